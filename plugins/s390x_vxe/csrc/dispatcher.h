/* What this library exports besides int8moe/abi.h: the processor, as the system describes it. */
#ifndef INT8MOE_S390X_DISPATCHER_H
#define INT8MOE_S390X_DISPATCHER_H

#include <int8moe/abi.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct int8moe_s390x_facts {
  uint32_t struct_bytes;
  uint32_t reserved;
  uint64_t hwcap; /* AT_HWCAP of the auxiliary vector; 0 where the system gives none */
} int8moe_s390x_facts;

/* Fills `facts`. */
INT8MOE_EXPORT int32_t int8moe_s390x_probe(int8moe_s390x_facts* facts);

#ifdef __cplusplus
}
#endif
#endif
