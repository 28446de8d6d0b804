// The baseline unit: exports, packing, and the probe. Compiled for z196, so that loading the library and asking it what
// the machine can do is safe everywhere that 64-bit Linux runs.
#if defined(__VX__)
#error "dispatcher.cpp is built for the z196 baseline: no -mvx, no -march=z13 or above"
#endif

#define INT8MOE_LANES 4
#include "dispatcher.h"

#if defined(__linux__)
#include <sys/auxv.h>
#endif

#include <int8moe/runtime.h>

#include "layout.h"

// Weakest first.
extern "C" {
extern const int8moe_tier int8moe_tier_scalar;
extern const int8moe_tier int8moe_tier_vx;
extern const int8moe_tier int8moe_tier_vxe;
static const int8moe_tier* const int8moe_tiers[] = {
    &int8moe_tier_scalar,
    &int8moe_tier_vx,
    &int8moe_tier_vxe,
};
static const int32_t int8moe_tiers_count = sizeof int8moe_tiers / sizeof int8moe_tiers[0];
}

#define INT8MOE_LAYOUT int8moe::S390xLayout
#include <int8moe/library.h>

extern "C" int32_t int8moe_s390x_probe(int8moe_s390x_facts* facts) {
  if (facts->struct_bytes != sizeof *facts) return INT8MOE_ERROR_VERSION;
#if defined(__linux__)
  facts->hwcap = getauxval(AT_HWCAP);
#else
  facts->hwcap = 0;
#endif
  return INT8MOE_OK;
}
