// Tier avx_vnni: u8 weights x s8 activations on 256-bit registers, for cores that have VNNI but no AVX-512.
//
// | intrinsic                 | instruction              | latency, per cycle (Golden Cove) |
// |---------------------------|--------------------------|----------------------------------|
// | _mm256_dpbusd_avx_epi32   | {vex} vpdpbusd ymm       | 5, 2                             |
// | _mm256_loadu_si256        | vmovdqu ymm, m256        | load port, of 3                  |
// | _mm256_set1_epi32 (load)  | vpbroadcastd ymm, m32    | load port                        |
//
// Gracemont does each in two halves, with two multipliers and two load ports for halves.
//
// Layout: a panel step is 64 bytes, 16 columns x 4 depths, so two ymm of 8 columns each:
//
//     c0 k0..3 | c1 k0..3 | ... | c7 k0..3     c8 k0..3 | ... | c15 k0..3
//
// They are the unsigned operand, which VEX has only in a register; the signed one is 4 bytes of a row of activations
// in every lane, for which VEX has no embedded broadcast. Rows are prepared as they are.
//
// Blocking, for 16 registers: two vpdpbusd per cycle of latency 5 want 10 chains.
//
//     rows  panels  chains  registers                         loads per step / vpdpbusd
//     4..6       1   8..12  + 2 weights + 1 broadcast           6..8 / 8..12
//        3       2      12  + 1 weight  + 3 broadcasts             7 / 12
//        2       2       8  + 1 weight  + 2 broadcasts             6 / 8
//        1       4       8  + 1 weight  + 1 broadcast              9 / 8
//
// With 6 rows a step takes 6 cycles of Golden Cove's two multipliers, and 8 loads fill less than half of its three
// load ports; Gracemont is bound by its multipliers, too (12 cycles, against 5 to 8 of loads). For many rows 6 x 1 is
// taken over 3 x 2 since it reads the weights, which come from L2 or memory, half as often. With few rows more panels
// keep the multipliers busy; these passes are bound by memory: one row reads 256 bytes of weights in 5 cycles.
// All of this is reasoned; this tier has not run on hardware yet.
#if !defined(__AVXVNNI__)
#error "tier_avx_vnni.cpp needs -mavx2 -mavxvnni"
#endif
#if defined(__FMA__) || defined(__AVX512F__)
#error "tier_avx_vnni.cpp is built for AVX2 and AVX-VNNI and nothing above: no -mfma, no -mavx512f"
#endif

#define INT8MOE_LANES 8
#include <immintrin.h>
#include <int8moe/driver.h>

#include "layout.h"

namespace int8moe {
namespace {

struct AvxVnniKernel {
  using Layout = X86Layout;
  static constexpr int kRows = 6;
  static constexpr int kPanels = 4;
  static constexpr int64_t kRowBytes = 1;
  static constexpr bool kSortedRows = false;
  static constexpr int64_t kPrefetch = 2048;  // bytes ahead in the stream of weights, or in all streams together

  static INT8MOE_INLINE void prepare(const int8_t q[64], uint8_t* row, int64_t k0) {
    __builtin_memcpy(row + k0, q, 64);
  }

  static INT8MOE_INLINE __m256i load_weights(const uint8_t* weights) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weights));
  }
  // Four activations, in every lane.
  static INT8MOE_INLINE __m256i broadcast(const uint8_t* row) {
    int32_t four;
    __builtin_memcpy(&four, row, 4);
    return _mm256_set1_epi32(four);
  }

  template <int kTileRows, int kTilePanels>
  static INT8MOE_NOINLINE void tile(const uint8_t* const* panel, int64_t ahead, const uint8_t* const* row,
                                    int64_t depth, int32_t* acc) {
    // Every loop but the one over depth is unrolled, or the accumulators would live in memory.
    __m256i sum[kTileRows][kTilePanels][2];
    const uint8_t* a[kTileRows];
    const uint8_t* b[kTilePanels];
#pragma GCC unroll 6
    for (int r = 0; r < kTileRows; ++r) {
      a[r] = row[r];
#pragma GCC unroll 4
      for (int p = 0; p < kTilePanels; ++p) sum[r][p][0] = sum[r][p][1] = _mm256_setzero_si256();
    }
#pragma GCC unroll 4
    for (int p = 0; p < kTilePanels; ++p) b[p] = panel[p];
    for (int64_t k = 0; k < depth; k += 4) {
#pragma GCC unroll 4
      for (int p = 0; p < kTilePanels; ++p)
        _mm_prefetch(reinterpret_cast<const char*>(b[p]) + (k * 16 + ahead), _MM_HINT_T0);
      if constexpr (kTilePanels == 1) {
        const __m256i left = load_weights(b[0] + k * 16), right = load_weights(b[0] + k * 16 + 32);
#pragma GCC unroll 6
        for (int r = 0; r < kTileRows; ++r) {
          const __m256i x = broadcast(a[r] + k);
          sum[r][0][0] = _mm256_dpbusd_avx_epi32(sum[r][0][0], left, x);
          sum[r][0][1] = _mm256_dpbusd_avx_epi32(sum[r][0][1], right, x);
        }
      } else {
        __m256i x[kTileRows];
#pragma GCC unroll 3
        for (int r = 0; r < kTileRows; ++r) x[r] = broadcast(a[r] + k);
#pragma GCC unroll 8
        for (int i = 0; i < 2 * kTilePanels; ++i) {
          const __m256i w = load_weights(b[i / 2] + k * 16 + i % 2 * 32);
#pragma GCC unroll 3
          for (int r = 0; r < kTileRows; ++r)
            sum[r][i / 2][i % 2] = _mm256_dpbusd_avx_epi32(sum[r][i / 2][i % 2], w, x[r]);
        }
      }
    }
#pragma GCC unroll 4
    for (int p = 0; p < kTilePanels; ++p)
#pragma GCC unroll 6
      for (int r = 0; r < kTileRows; ++r) {
        int32_t* out = acc + (p * kRows + r) * 16;
        _mm256_store_si256(reinterpret_cast<__m256i*>(out), sum[r][p][0]);
        _mm256_store_si256(reinterpret_cast<__m256i*>(out + 8), sum[r][p][1]);
      }
  }

  // Groups of kTilePanels panels, from panel `first` on; returns the first panel that is left.
  template <int kTileRows, int kTilePanels>
  static INT8MOE_INLINE int tiles(const GemmBlock<kPanels>& block, int first, bool last_pass,
                                  const uint8_t* const* row, int32_t* acc) {
    // The last of several passes over the panels fetches what comes next; the others, their own streams.
    const int64_t ahead = last_pass ? block.next_offset : kPrefetch / kTilePanels;
    int p = first;
    for (; p + kTilePanels <= block.panels; p += kTilePanels)
      tile<kTileRows, kTilePanels>(block.panel + p, ahead, row, block.depth, acc + p * kRows * 16);
    return p;
  }

  template <int kTileRows>
  static INT8MOE_INLINE void all_panels(const GemmBlock<kPanels>& block, bool last_pass, const uint8_t* const* row,
                                        int32_t* acc) {
    int p = 0;
    if constexpr (kTileRows == 1) p = tiles<kTileRows, 4>(block, p, last_pass, row, acc);
    if constexpr (kTileRows <= 3) p = tiles<kTileRows, 2>(block, p, last_pass, row, acc);
    tiles<kTileRows, 1>(block, p, last_pass, row, acc);
  }

  // vpdpbusd on registers, 12 chains.
  static INT8MOE_NOINLINE int64_t peak(int64_t iterations) {
    constexpr int kChains = 12, kUnrolled = 16;
    __m256i sum[kChains], w = _mm256_set1_epi8(3), x = _mm256_set1_epi8(5);
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) {
      sum[i] = _mm256_setzero_si256();
      __asm__ volatile("" : "+x"(sum[i]));  // chains of equal value would be one
    }
    for (int64_t n = 0; n < iterations * kUnrolled; ++n) {
      __asm__ volatile("" : "+x"(w), "+x"(x));
#pragma GCC unroll 12
      for (int i = 0; i < kChains; ++i) sum[i] = _mm256_dpbusd_avx_epi32(sum[i], w, x);
    }
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) __asm__ volatile("" : : "x"(sum[i]));
    return iterations * kUnrolled * kChains * 32;
  }

  template <class Epilogue>
  static INT8MOE_INLINE void gemm(const GemmBlock<kPanels>& block, Epilogue&& epilogue) {
    alignas(64) int32_t acc[kPanels * kRows * 16];
    const uint8_t* row[kRows];
    for (int64_t r0 = 0; r0 < block.rows; r0 += kRows) {
      const int rows = static_cast<int>(block.rows - r0 < kRows ? block.rows - r0 : kRows);
      for (int r = 0; r < rows; ++r) row[r] = block.row(r0 + r);
      const bool last_pass = r0 > 0 && r0 + kRows >= block.rows;
      switch (rows) {
        case 1: all_panels<1>(block, last_pass, row, acc); break;
        case 2: all_panels<2>(block, last_pass, row, acc); break;
        case 3: all_panels<3>(block, last_pass, row, acc); break;
        case 4: all_panels<4>(block, last_pass, row, acc); break;
        case 5: all_panels<5>(block, last_pass, row, acc); break;
        default: all_panels<6>(block, last_pass, row, acc); break;
      }
      epilogue(r0, rows, acc);
    }
  }
};

}  // namespace
}  // namespace int8moe

INT8MOE_DEFINE_TIER(avx_vnni, int8moe::AvxVnniKernel)
