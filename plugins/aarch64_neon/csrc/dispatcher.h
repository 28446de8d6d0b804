/* What this library exports besides int8moe/abi.h: the processor, as the system describes it. */
#ifndef INT8MOE_AARCH64_DISPATCHER_H
#define INT8MOE_AARCH64_DISPATCHER_H

#include <int8moe/abi.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct int8moe_aarch64_facts {
  uint32_t struct_bytes;
  uint32_t reserved;
  uint64_t hwcap;  /* AT_HWCAP of Linux; elsewhere the same bits, of the features that a tier needs */
  uint64_t hwcap2; /* AT_HWCAP2, likewise */
} int8moe_aarch64_facts;

INT8MOE_EXPORT int32_t int8moe_aarch64_probe(int8moe_aarch64_facts* facts);

#ifdef __cplusplus
}
#endif
#endif
