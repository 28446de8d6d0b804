// Tier avx512_vnni: u8 weights x s8 activations, four products and a sum per lane and instruction. Its tiles, their
// layout and blocking are those of tile_avx512_vnni.h.
#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512VL__) || !defined(__AVX512VNNI__)
#error "tier_avx512_vnni.cpp needs -mavx512f -mavx512bw -mavx512vl -mavx512vnni"
#endif

#define INT8MOE_LANES 16
#include <immintrin.h>
#include <int8moe/driver.h>

#include "layout.h"
#include "tile_avx512_vnni.h"

namespace int8moe {
namespace {

struct Avx512VnniKernel {
  using Layout = X86Layout;
  static constexpr int kRows = 6;
  static constexpr int kPanels = 4;
  static constexpr int64_t kRowBytes = 1;
  static constexpr bool kSortedRows = false;
  using Tile = Avx512VnniTile<kRows, kRows>;

  static INT8MOE_INLINE void prepare(const int8_t q[64], uint8_t* row, int64_t k0) {
    __builtin_memcpy(row + k0, q, 64);
  }

  // vpdpbusd on registers, 16 chains.
  static INT8MOE_NOINLINE int64_t peak(int64_t iterations) {
    constexpr int kChains = 16, kUnrolled = 16;
    __m512i sum[kChains], w = _mm512_set1_epi8(3), x = _mm512_set1_epi8(5);
#pragma GCC unroll 16
    for (int i = 0; i < kChains; ++i) {
      sum[i] = _mm512_setzero_si512();
      __asm__ volatile("" : "+v"(sum[i]));  // chains of equal value would be one
    }
    for (int64_t n = 0; n < iterations * kUnrolled; ++n) {
      __asm__ volatile("" : "+v"(w), "+v"(x));
#pragma GCC unroll 16
      for (int i = 0; i < kChains; ++i) sum[i] = _mm512_dpbusd_epi32(sum[i], w, x);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kChains; ++i) __asm__ volatile("" : : "v"(sum[i]));
    return iterations * kUnrolled * kChains * 64;
  }

  template <class Epilogue>
  static INT8MOE_INLINE void gemm(const GemmBlock<kPanels>& block, Epilogue&& epilogue) {
    alignas(64) int32_t acc[kPanels * kRows * 16];
    const uint8_t* row[kRows];
    for (int64_t r0 = 0; r0 < block.rows; r0 += kRows) {
      const int rows = static_cast<int>(block.rows - r0 < kRows ? block.rows - r0 : kRows);
      for (int r = 0; r < rows; ++r) row[r] = block.row(r0 + r);
      // The last of several passes over the panels fetches what comes next; the others, their own streams.
      const int64_t ahead = r0 > 0 && r0 + kRows >= block.rows ? block.next_offset : Tile::kPrefetch;
      Tile::all_panels(block, ahead, row, rows, acc);
      epilogue(r0, rows, acc);
    }
  }
};

}  // namespace
}  // namespace int8moe

INT8MOE_DEFINE_TIER(avx512_vnni, int8moe::Avx512VnniKernel)
