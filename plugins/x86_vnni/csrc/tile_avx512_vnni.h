// Tiles of vpdpbusd zmm: what tier avx512_vnni is made of, and what tier amx_int8 uses for few rows.
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
// of weights, each prefetched.
#ifndef INT8MOE_X86_TILE_AVX512_VNNI_H
#define INT8MOE_X86_TILE_AVX512_VNNI_H
#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512VL__) || !defined(__AVX512VNNI__)
#error "tile_avx512_vnni.h needs -mavx512f -mavx512bw -mavx512vl -mavx512vnni"
#endif

#include <immintrin.h>
#include <int8moe/microkernel.h>
#include <int8moe/vectors.h>

namespace int8moe {
namespace {

// Tiles of up to kMostRows rows, whose sums go to acc[panel][kAccRows][16].
template <int kMostRows, int kAccRows>
struct Avx512VnniTile {
  static_assert(kMostRows <= 6 && kMostRows <= kAccRows, "accumulators have to fit in registers, and in acc");
  static constexpr int64_t kPrefetch = 1024;  // bytes ahead in each of the panels' streams

  // The first `rows` rows, of every panel of the block. `ahead` is how far from each weight to prefetch.
  template <int kPanels>
  static INT8MOE_INLINE void all_panels(const GemmBlock<kPanels>& block, int64_t ahead, const uint8_t* const* row,
                                        int rows, int32_t* acc) {
    int p = 0;
    if (block.panels == 4) {
      tiles<kMostRows, 4>(rows, block.panel, ahead, row, block.depth, acc);
      p = 4;
    } else if (block.panels >= 2) {
      tiles<kMostRows, 2>(rows, block.panel, ahead, row, block.depth, acc);
      p = 2;
    }
    for (; p < block.panels; ++p)
      tiles<kMostRows, 1>(rows, block.panel + p, ahead, row, block.depth, acc + p * kAccRows * 16);
  }

 private:
  template <int kTileRows, int kTilePanels>
  static INT8MOE_INLINE void tiles(int rows, const uint8_t* const* panel, int64_t ahead, const uint8_t* const* row,
                                   int64_t depth, int32_t* acc) {
    if constexpr (kTileRows > 1)
      if (rows < kTileRows) return tiles<kTileRows - 1, kTilePanels>(rows, panel, ahead, row, depth, acc);
    tile<kTileRows, kTilePanels>(panel, ahead, row, depth, acc);
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
        __asm__("" : "+v"(w[p]));  // or it would be loaded again for each row
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
      for (int r = 0; r < kTileRows; ++r) _mm512_storeu_si512(acc + (p * kAccRows + r) * 16, sum[r][p]);
  }
};

}  // namespace
}  // namespace int8moe
#endif
