// Tier avx512_vnni: u8 weights x s8 activations, four products and a sum per lane and instruction.
//
// | intrinsic               | instruction               | latency, per cycle (Ice Lake server / Zen 4) |
// |-------------------------|---------------------------|----------------------------------------------|
// | _mm512_dpbusd_epi32     | vpdpbusd zmm, zmm, zmm    | 5, 2 / 4, 1                                  |
// | _mm512_loadu_si512      | vmovdqu64 zmm, m512       | load port                                    |
// | _mm512_set1_epi32       | vpbroadcastd zmm, m32     | load port                                    |
//
// Layout: a panel step is one zmm, 16 columns x 4 depths, the unsigned operand:
//
//     c0 k0..3 | c1 k0..3 | ... | c15 k0..3         64 bytes, one cache line
//
// The signed operand is 4 bytes of a row of activations in every lane: rows are prepared as they are.
//
// Blocking: 6 rows x 4 panels is 24 accumulators + 4 registers of weights + 1 broadcast, of 32. 24 independent
// chains hide the latency; 10 loads serve 24 vpdpbusd. With few rows, 4 panels still give 4 chains, and 4 streams
// of weights, each prefetched. Few intrinsics on purpose: tests/native/shim stands in for them on other machines.
#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512VL__) || !defined(__AVX512VNNI__)
#error "tier_avx512_vnni.cpp needs -mavx512f -mavx512bw -mavx512vl -mavx512vnni"
#endif

#define INT8MOE_LANES 16
#include <immintrin.h>
#include <int8moe/driver.h>

#include "layout.h"

namespace int8moe {
namespace {

struct Avx512VnniKernel {
  using Layout = X86Layout;
  static constexpr int kRows = 6;
  static constexpr int kPanels = 4;
  static constexpr int64_t kRowBytes = 1;
  static constexpr int64_t kPrefetch = 1024;  // bytes ahead in each of the panels' streams

  static INT8MOE_INLINE void prepare(const int8_t q[64], uint8_t* row, int64_t k0) {
    __builtin_memcpy(row + k0, q, 64);
  }

  template <int kTileRows, int kTilePanels>
  static INT8MOE_NOINLINE void tile(const uint8_t* const* panel, int64_t ahead, const uint8_t* const* row,
                                    int64_t depth, int32_t* acc) {
    // Every loop but the one over depth is unrolled, or the accumulators would live in memory.
    __m512i sum[kTileRows][kTilePanels];
    const uint8_t* a[kTileRows];
    const uint8_t* b[kTilePanels];
#pragma GCC unroll 6
    for (int r = 0; r < kTileRows; ++r) {
      a[r] = row[r];
#pragma GCC unroll 4
      for (int p = 0; p < kTilePanels; ++p) sum[r][p] = _mm512_setzero_si512();
    }
#pragma GCC unroll 4
    for (int p = 0; p < kTilePanels; ++p) b[p] = panel[p];
    for (int64_t k = 0; k < depth; k += 4) {
      __m512i w[kTilePanels];
#pragma GCC unroll 4
      for (int p = 0; p < kTilePanels; ++p) {
        w[p] = _mm512_loadu_si512(b[p] + k * 16);
        _mm_prefetch(reinterpret_cast<const char*>(b[p]) + (k * 16 + ahead), _MM_HINT_T0);
      }
#pragma GCC unroll 6
      for (int r = 0; r < kTileRows; ++r) {
        int32_t four;
        __builtin_memcpy(&four, a[r] + k, 4);
        const __m512i x = _mm512_set1_epi32(four);
#pragma GCC unroll 4
        for (int p = 0; p < kTilePanels; ++p) sum[r][p] = _mm512_dpbusd_epi32(sum[r][p], w[p], x);
      }
    }
#pragma GCC unroll 4
    for (int p = 0; p < kTilePanels; ++p)
#pragma GCC unroll 6
      for (int r = 0; r < kTileRows; ++r) _mm512_storeu_si512(acc + (p * kRows + r) * 16, sum[r][p]);
  }

  template <int kTilePanels>
  static INT8MOE_INLINE void tiles(int rows, const uint8_t* const* panel, int64_t ahead, const uint8_t* const* row,
                                   int64_t depth, int32_t* acc) {
    switch (rows) {
      case 1: return tile<1, kTilePanels>(panel, ahead, row, depth, acc);
      case 2: return tile<2, kTilePanels>(panel, ahead, row, depth, acc);
      case 3: return tile<3, kTilePanels>(panel, ahead, row, depth, acc);
      case 4: return tile<4, kTilePanels>(panel, ahead, row, depth, acc);
      case 5: return tile<5, kTilePanels>(panel, ahead, row, depth, acc);
      default: return tile<6, kTilePanels>(panel, ahead, row, depth, acc);
    }
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
      const int64_t ahead = r0 > 0 && r0 + kRows >= block.rows ? block.next_offset : kPrefetch;
      int p = 0;
      if (block.panels == 4) {
        tiles<4>(rows, block.panel, ahead, row, block.depth, acc);
        p = 4;
      } else if (block.panels >= 2) {
        tiles<2>(rows, block.panel, ahead, row, block.depth, acc);
        p = 2;
      }
      for (; p < block.panels; ++p)
        tiles<1>(rows, block.panel + p, ahead, row, block.depth, acc + p * kRows * 16);
      epilogue(r0, rows, acc);
    }
  }
};

}  // namespace
}  // namespace int8moe

INT8MOE_DEFINE_TIER(avx512_vnni, int8moe::Avx512VnniKernel)
