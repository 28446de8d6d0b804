// The baseline unit: exports, packing, and the probe. Compiled for plain Armv8-A, so that loading the library and
// asking it what the machine can do is safe everywhere.
#if defined(__ARM_FEATURE_DOTPROD) || defined(__ARM_FEATURE_MATMUL_INT8) || defined(__ARM_FEATURE_SVE)
#error "dispatcher.cpp is built for the Armv8-A baseline: no +dotprod or above, no -mcpu=native"
#endif

#define INT8MOE_LANES 4
#include "dispatcher.h"

#if defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(__linux__)
#include <sys/auxv.h>
#endif

#include <int8moe/runtime.h>

#include "layout.h"

// Weakest first. CMakeLists.txt defines a macro for each tier that this compiler can build.
extern "C" {
extern const int8moe_tier int8moe_tier_neon;
extern const int8moe_tier int8moe_tier_dotprod;
extern const int8moe_tier int8moe_tier_i8mm;
static const int8moe_tier* const int8moe_tiers[] = {
    &int8moe_tier_neon,
#if INT8MOE_TIER_dotprod
    &int8moe_tier_dotprod,
#endif
#if INT8MOE_TIER_i8mm
    &int8moe_tier_i8mm,
#endif
};
static const int32_t int8moe_tiers_count = sizeof int8moe_tiers / sizeof int8moe_tiers[0];
}

#define INT8MOE_LAYOUT int8moe::Aarch64Layout
#include <int8moe/library.h>

namespace {

#if defined(__APPLE__)
constexpr uint64_t kAsimd = 1u << 1, kAtomics = 1u << 8, kAsimdDp = 1u << 20;  // AT_HWCAP
constexpr uint64_t kI8mm = 1u << 13;                                           // AT_HWCAP2

bool has(const char* name) {
  int32_t value = 0;
  size_t bytes = sizeof value;
  return sysctlbyname(name, &value, &bytes, nullptr, 0) == 0 && value != 0;
}
#endif

}  // namespace

extern "C" int32_t int8moe_aarch64_probe(int8moe_aarch64_facts* facts) {
  if (facts->struct_bytes != sizeof *facts) return INT8MOE_ERROR_VERSION;
  *facts = {};
  facts->struct_bytes = sizeof *facts;
#if defined(__APPLE__)
  facts->hwcap = kAsimd | (has("hw.optional.arm.FEAT_LSE") ? kAtomics : 0) |
                 (has("hw.optional.arm.FEAT_DotProd") ? kAsimdDp : 0);
  facts->hwcap2 = has("hw.optional.arm.FEAT_I8MM") ? kI8mm : 0;
#elif defined(__linux__)
  facts->hwcap = getauxval(AT_HWCAP);
  facts->hwcap2 = getauxval(AT_HWCAP2);
#endif
  return INT8MOE_OK;
}
