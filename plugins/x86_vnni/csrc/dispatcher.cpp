// The baseline unit: exports, packing, and the probe. Compiled for plain x86-64, so that loading the library and
// asking it what the machine can do is safe everywhere.
#if defined(__AVX__)
#error "dispatcher.cpp is built for the x86-64 baseline: no -mavx or above, no -march=native"
#endif

#define INT8MOE_LANES 4
#include "dispatcher.h"

#include <cpuid.h>
#include <errno.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <int8moe/runtime.h>

#include "layout.h"

// Weakest first. CMakeLists.txt defines a macro for each tier that this compiler can build.
extern "C" {
extern const int8moe_tier int8moe_tier_avx2;
extern const int8moe_tier int8moe_tier_avx_vnni;
extern const int8moe_tier int8moe_tier_avx512_vnni;
extern const int8moe_tier int8moe_tier_amx_int8;
static const int8moe_tier* const int8moe_tiers[] = {
    &int8moe_tier_avx2,
#if INT8MOE_TIER_avx_vnni
    &int8moe_tier_avx_vnni,
#endif
    &int8moe_tier_avx512_vnni,
#if INT8MOE_TIER_amx_int8
    &int8moe_tier_amx_int8,
#endif
};
static const int32_t int8moe_tiers_count = sizeof int8moe_tiers / sizeof int8moe_tiers[0];
}

#define INT8MOE_LAYOUT int8moe::X86Layout
#include <int8moe/library.h>

namespace {

constexpr uint32_t kOsxsave = 1u << 27;   // leaf 1, ecx
constexpr uint32_t kAmxTile = 1u << 24;   // leaf 7, edx
constexpr uint64_t kTileState = 3u << 17;  // XCR0: TILECFG and TILEDATA

uint64_t read_xcr0() {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<uint64_t>(high) << 32 | low;
}

int32_t request_amx() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr long kArchReqXcompPerm = 0x1023, kXfeatureTileData = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureTileData) == 0 ? 0 : errno;
#else
  return 0;
#endif
}

}  // namespace

extern "C" int32_t int8moe_x86_probe(int8moe_x86_facts* facts, int32_t ask_for_amx) {
  if (facts->struct_bytes != sizeof *facts) return INT8MOE_ERROR_VERSION;
  *facts = {};
  facts->struct_bytes = sizeof *facts;
  facts->amx_permission = -1;
  uint32_t a, b, c, d;
  if (__get_cpuid(1, &a, &b, &c, &d)) {
    facts->leaf1_ecx = c;
    facts->leaf1_edx = d;
  }
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
    facts->leaf7_ebx = b;
    facts->leaf7_ecx = c;
    facts->leaf7_edx = d;
    if (a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) {
      facts->leaf7_1_eax = a;
      facts->leaf7_1_edx = d;
    }
  }
  if (facts->leaf1_ecx & kOsxsave) facts->xcr0 = read_xcr0();
  if (ask_for_amx && (facts->leaf7_edx & kAmxTile) && (facts->xcr0 & kTileState) == kTileState)
    facts->amx_permission = request_amx();
  return INT8MOE_OK;
}
