// Tier neon: signed 8-bit products widened to 16 and summed to 32 bits, on any Armv8-A (Cortex-A53, A57, A72, A73).
//
// | intrinsic                   | instruction               | latency, per cycle (Cortex-A72) |
// |-----------------------------|---------------------------|---------------------------------|
// | vmull_s8, vmull_high_s8     | smull(2) v.8h, v.8b, v.8b | 4, 1 (pipe F0)                  |
// | vpadalq_s16                 | sadalp v.4s, v.8h         | 4 (1 to the next sum), 1 (F1)   |
// | vld1q_s8                    | ldr q                     | 5, 1                            |
//
// Layout: a vector of weights is two columns x 8 depths, and activations stand in both halves (repeated_rows.h), so
// smull and smull2 give a column's products each, and sadalp adds neighbours into that column's four partial sums.
//
// Exact: a product is at most (-128)(-128) = 2^14. Two products in one 16-bit lane (smull, then smlal) would save a
// sadalp, but (-128)(-128) twice is 2^15, one too many, and rows that come as int8 may hold -128. On a Cortex-A72 that
// saves nothing, either: multiplications have a pipe of their own, which this loop fills as well.
//
// Blocking, for 32 registers: a column of a row is a register of sums.
//
//     rows  panels  sums  loads per step / smull
//        3       1    24      7 / 24
//        2       1    16      6 / 16
//        1       2    16      9 / 16
//
// More rows a tile would save loads that are not what this loop waits for.
#if !defined(__ARM_NEON) || !defined(__aarch64__)
#error "tier_neon.cpp is for AArch64 with Advanced SIMD: -march=armv8-a"
#endif
#if defined(__ARM_FEATURE_DOTPROD) || defined(__ARM_FEATURE_MATMUL_INT8) || defined(__ARM_FEATURE_SVE)
#error "tier_neon.cpp is built for Armv8-A and nothing above: no +dotprod, no +i8mm, no +sve"
#endif

#define INT8MOE_LANES 4
#include <arm_neon.h>
#include <int8moe/driver.h>

#include "layout.h"
#include "repeated_rows.h"

namespace int8moe {
namespace {

struct NeonKernel {
  using Layout = Aarch64Layout;
  static constexpr int kRows = 3;
  static constexpr int kPanels = 8;
  static constexpr int64_t kRowBytes = kRepeats;
  static constexpr bool kSortedRows = false;

  static INT8MOE_INLINE void prepare(const int8_t q[64], uint8_t* row, int64_t k0) { prepare_repeated(q, row, k0); }

  static INT8MOE_INLINE int8x16_t load_bytes(const uint8_t* p) { return vreinterpretq_s8_u8(vld1q_u8(p)); }
  // What is loaded behind it stays behind it. Or the compiler would load a step's operands first, and spill sums for them.
  static INT8MOE_INLINE void hold_loads() { __asm__ volatile("" : : : "memory"); }

  // Two columns.
  static INT8MOE_INLINE void add_products(int32x4_t* sum, int8x16_t w, int8x16_t x) {
    sum[0] = vpadalq_s16(sum[0], vmull_s8(vget_low_s8(w), vget_low_s8(x)));
    sum[1] = vpadalq_s16(sum[1], vmull_high_s8(w, x));
  }

  static INT8MOE_INLINE int32x4_t four_columns(const int32x4_t* sum) {
    return vpaddq_s32(vpaddq_s32(sum[0], sum[1]), vpaddq_s32(sum[2], sum[3]));
  }

  // Every loop but the one over depth is unrolled, or the sums would live in memory.
  template <int kTileRows, int kTilePanels>
  static INT8MOE_NOINLINE void tile(const uint8_t* const* panel, const uint8_t* const* row, int64_t depth,
                                    int32_t* acc) {
    int32x4_t sum[kTileRows][kTilePanels][8];
    const uint8_t* a[kTileRows];
    const uint8_t* b[kTilePanels];
#pragma GCC unroll 3
    for (int r = 0; r < kTileRows; ++r) {
      a[r] = row[r];
#pragma GCC unroll 16
      for (int i = 0; i < 8 * kTilePanels; ++i) sum[r][i / 8][i % 8] = vdupq_n_s32(0);
    }
#pragma GCC unroll 2
    for (int p = 0; p < kTilePanels; ++p) b[p] = panel[p];
    for (int64_t k = 0; k < depth; k += 8) {
      int8x16_t x[kTileRows];
#pragma GCC unroll 3
      for (int r = 0; r < kTileRows; ++r) x[r] = load_bytes(a[r] + k * kRepeats);
#pragma GCC unroll 8
      for (int i = 0; i < 4 * kTilePanels; ++i) {
        hold_loads();
        const int8x16_t w = load_bytes(b[i / 4] + k * 8 + i % 4 * 16);
#pragma GCC unroll 3
        for (int r = 0; r < kTileRows; ++r) {
          int32x4_t* const column = &sum[r][i / 4][i % 4 * 2];
          add_products(column, w, x[r]);
          // Or four products are under way at a time, and a sum is spilled for them.
          if (kTileRows == 3 && r % 2 == 0) __asm__ volatile("" : "+w"(column[0]), "+w"(column[1]));
        }
      }
    }
#pragma GCC unroll 2
    for (int p = 0; p < kTilePanels; ++p)
#pragma GCC unroll 3
      for (int r = 0; r < kTileRows; ++r) {
        int32_t* const out = acc + (p * kRows + r) * 8;
        vst1q_s32(out, four_columns(sum[r][p]));
        vst1q_s32(out + 4, four_columns(sum[r][p] + 4));
      }
  }

  // Groups of kTilePanels panels, then what is left one by one.
  template <int kTileRows, int kTilePanels>
  static INT8MOE_INLINE void tiles(const GemmBlock<kPanels>& block, const uint8_t* const* row, int32_t* acc) {
    int p = 0;
    for (; p + kTilePanels <= block.panels; p += kTilePanels)
      tile<kTileRows, kTilePanels>(block.panel + p, row, block.depth, acc + p * kRows * 8);
    if (kTilePanels > 1)
      for (; p < block.panels; ++p) tile<kTileRows, 1>(block.panel + p, row, block.depth, acc + p * kRows * 8);
  }

  // smull and sadalp on registers, 16 chains.
  static INT8MOE_NOINLINE int64_t peak(int64_t iterations) {
    constexpr int kChains = 16, kUnrolled = 8;
    int32x4_t sum[kChains];
    int8x16_t w = vdupq_n_s8(3), x = vdupq_n_s8(5);
#pragma GCC unroll 16
    for (int i = 0; i < kChains; ++i) {
      sum[i] = vdupq_n_s32(0);
      __asm__ volatile("" : "+w"(sum[i]));  // chains of equal value would be one
    }
    for (int64_t n = 0; n < iterations * kUnrolled; ++n) {
#pragma GCC unroll 8
      for (int i = 0; i < kChains; i += 2) {
        __asm__ volatile("" : "+w"(w), "+w"(x));  // or one product would serve all chains
        add_products(sum + i, w, x);
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < kChains; ++i) __asm__ volatile("" : : "w"(sum[i]));
    return iterations * kUnrolled * kChains * 8;
  }

  template <class Epilogue>
  static INT8MOE_INLINE void gemm(const GemmBlock<kPanels>& block, Epilogue&& epilogue) {
    alignas(64) int32_t acc[kPanels * kRows * 8];
    const uint8_t* row[kRows];
    for (int64_t r0 = 0; r0 < block.rows; r0 += kRows) {
      const int rows = static_cast<int>(block.rows - r0 < kRows ? block.rows - r0 : kRows);
      for (int r = 0; r < rows; ++r) row[r] = block.row(r0 + r);
      switch (rows) {
        case 1: tiles<1, 2>(block, row, acc); break;
        case 2: tiles<2, 1>(block, row, acc); break;
        default: tiles<3, 1>(block, row, acc); break;
      }
      epilogue(r0, rows, acc);
    }
  }
};

}  // namespace
}  // namespace int8moe

INT8MOE_DEFINE_TIER(neon, int8moe::NeonKernel)
