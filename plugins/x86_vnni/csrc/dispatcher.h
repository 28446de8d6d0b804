/* What this library exports besides int8moe/abi.h: the processor, as it describes itself. */
#ifndef INT8MOE_X86_DISPATCHER_H
#define INT8MOE_X86_DISPATCHER_H

#include <int8moe/abi.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct int8moe_x86_facts {
  uint32_t struct_bytes;
  uint32_t leaf1_ecx, leaf1_edx;
  uint32_t leaf7_ebx, leaf7_ecx, leaf7_edx; /* subleaf 0 */
  uint32_t leaf7_1_eax, leaf7_1_edx;        /* subleaf 1 */
  uint64_t xcr0;                            /* 0 where the system does not enable XSAVE */
  int32_t amx_permission;                   /* 0 granted, > 0 the errno of the refusal, -1 not asked */
  uint32_t reserved;
} int8moe_x86_facts;

/* Fills `facts`; asks Linux for the AMX tile state only when told to and when the processor has it. */
INT8MOE_EXPORT int32_t int8moe_x86_probe(int8moe_x86_facts* facts, int32_t ask_for_amx);

#ifdef __cplusplus
}
#endif
#endif
