// Tier i8mm: 2 x 8 by 8 x 2 products of signed bytes in one instruction (FEAT_I8MM: Neoverse V1, N2, V2, Cortex-A510,
// A710, X2 and later, Apple M2 and later).
//
// | intrinsic    | instruction              | latency, per cycle (Neoverse V2 / N2) |
// |--------------|--------------------------|---------------------------------------|
// | vmmlaq_s32   | smmla v.4s, v.16b, v.16b | 3 (1 to the next sum), 4 / 2          |
// | vld1q_s8     | ldr q                    | 6, 3                                  |
//
// One operand is two rows x 8 depths of activations, so rows are prepared in pairs, interleaved by 8 bytes (kRowGroup);
// the other is a vector of weights, two columns x 8 depths. A sum is a square of two rows by two columns:
//
//     sum = r0 c0 | r0 c1 | r1 c0 | r1 c1
//
// and halves of two such sums, put together at the end, are four columns of a row. Where an expert's rows begin within a
// pair, the other row's sums are computed along and dropped.
//
// Blocking, for 32 registers: four smmla per cycle of latency 3, of which the sum needs the last only.
//
//     rows  pairs  panels  sums  registers                       loads per step / smmla
//     12        6       1    24  + 4 weights + 2 activations          10 / 24
//     8, 10  4, 5       1  16, 20                                   8, 9 / 16, 20
//      6        3       2    24  + 3 activations + 2 weights          11 / 24
//      4        2       3    24  + 2 activations + 2 weights          14 / 24
//      2        1       4    16                                       17 / 16
//
// A single row leaves half of each smmla unused; it is bound by memory nevertheless, 64 bytes of weights for every four
// of them. All of this is reasoned, and what a scheduling model of LLVM says of it (benchmarks/static_cycles.py).
#if !defined(__ARM_FEATURE_MATMUL_INT8)
#error "tier_i8mm.cpp needs -march=armv8.2-a+i8mm"
#endif
#if defined(__ARM_FEATURE_SVE)
#error "tier_i8mm.cpp is built for Advanced SIMD with I8MM and nothing above: no +sve"
#endif

#define INT8MOE_LANES 4
#include <arm_neon.h>
#include <int8moe/driver.h>

#include "layout.h"

namespace int8moe {
namespace {

struct I8mmKernel {
  using Layout = Aarch64Layout;
  static constexpr int kRows = 12;
  static constexpr int kPanels = 8;
  static constexpr int64_t kRowBytes = 1;
  static constexpr bool kSortedRows = true;
  static constexpr int kRowGroup = 2;

  static INT8MOE_INLINE void prepare(const int8_t q[64], uint8_t* row, int64_t k0) {
    uint8_t* const out = row + k0 * kRowGroup;
#pragma GCC unroll 8
    for (int i = 0; i < 64; i += 8) __builtin_memcpy(out + i * kRowGroup, q + i, 8);
  }

  static INT8MOE_INLINE int8x16_t load_bytes(const uint8_t* p) { return vreinterpretq_s8_u8(vld1q_u8(p)); }
  // What is loaded behind it stays behind it. Or the compiler would load a step's operands first, and spill sums for them.
  static INT8MOE_INLINE void hold_loads() { __asm__ volatile("" : : : "memory"); }

  // The `half` of two squares: one row, four columns.
  static INT8MOE_INLINE int32x4_t four_columns(const int32x4_t* sum, int half) {
    const int64x2_t left = vreinterpretq_s64_s32(sum[0]), right = vreinterpretq_s64_s32(sum[1]);
    return vreinterpretq_s32_s64(half == 0 ? vzip1q_s64(left, right) : vzip2q_s64(left, right));
  }

  // `pairs` points to the first pair of rows, the others `pair_stride` bytes apart. Every loop but the one over depth is
  // unrolled, or the sums would live in memory.
  template <int kPairs, int kTilePanels>
  static INT8MOE_NOINLINE void tile(const uint8_t* const* panel, const uint8_t* pairs, int64_t pair_stride,
                                    int64_t depth, int32_t* acc) {
    int32x4_t sum[kPairs][kTilePanels][4];
    const uint8_t* a[kPairs];
    const uint8_t* b[kTilePanels];
#pragma GCC unroll 6
    for (int r = 0; r < kPairs; ++r) {
      a[r] = pairs + r * pair_stride;
#pragma GCC unroll 16
      for (int i = 0; i < 4 * kTilePanels; ++i) sum[r][i / 4][i % 4] = vdupq_n_s32(0);
    }
#pragma GCC unroll 4
    for (int p = 0; p < kTilePanels; ++p) b[p] = panel[p];
    for (int64_t k = 0; k < depth; k += 8) {
      int8x16_t x[kPairs];
      if constexpr (kTilePanels == 1) {
        int8x16_t w[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) w[i] = load_bytes(b[0] + k * 8 + i * 16);
#pragma GCC unroll 6
        for (int r = 0; r < kPairs; ++r) {
          if (r % 2 == 0) hold_loads();
          x[r] = load_bytes(a[r] + k * kRowGroup);
#pragma GCC unroll 4
          for (int i = 0; i < 4; ++i) sum[r][0][i] = vmmlaq_s32(sum[r][0][i], x[r], w[i]);
        }
      } else {
#pragma GCC unroll 6
        for (int r = 0; r < kPairs; ++r) x[r] = load_bytes(a[r] + k * kRowGroup);
#pragma GCC unroll 16
        for (int i = 0; i < 4 * kTilePanels; ++i) {
          if (i % 2 == 0) hold_loads();
          const int8x16_t w = load_bytes(b[i / 4] + k * 8 + i % 4 * 16);
#pragma GCC unroll 6
          for (int r = 0; r < kPairs; ++r) sum[r][i / 4][i % 4] = vmmlaq_s32(sum[r][i / 4][i % 4], x[r], w);
        }
      }
    }
#pragma GCC unroll 4
    for (int p = 0; p < kTilePanels; ++p)
#pragma GCC unroll 12
      for (int r = 0; r < 2 * kPairs; ++r) {
        int32_t* const out = acc + (p * kRows + r) * 8;
        vst1q_s32(out, four_columns(sum[r / 2][p], r % 2));
        vst1q_s32(out + 4, four_columns(sum[r / 2][p] + 2, r % 2));
      }
  }

  // Groups of kTilePanels panels, from panel `first` on; returns the first panel that is left.
  template <int kPairs, int kTilePanels>
  static INT8MOE_INLINE int tiles(const GemmBlock<kPanels>& block, int first, const uint8_t* pairs, int32_t* acc) {
    int p = first;
    for (; p + kTilePanels <= block.panels; p += kTilePanels)
      tile<kPairs, kTilePanels>(block.panel + p, pairs, kRowGroup * block.row_stride, block.depth,
                                acc + p * kRows * 8);
    return p;
  }

  template <int kPairs>
  static INT8MOE_INLINE void all_panels(const GemmBlock<kPanels>& block, const uint8_t* pairs, int32_t* acc) {
    int p = 0;
    if constexpr (kPairs == 1) p = tiles<kPairs, 4>(block, p, pairs, acc);
    if constexpr (kPairs == 2) p = tiles<kPairs, 3>(block, p, pairs, acc);
    if constexpr (kPairs <= 3) p = tiles<kPairs, 2>(block, p, pairs, acc);
    tiles<kPairs, 1>(block, p, pairs, acc);
  }

  // smmla on registers, 24 chains.
  static INT8MOE_NOINLINE int64_t peak(int64_t iterations) {
    constexpr int kChains = 24, kUnrolled = 8;
    int32x4_t sum[kChains];
    int8x16_t w = vdupq_n_s8(3), x = vdupq_n_s8(5);
#pragma GCC unroll 24
    for (int i = 0; i < kChains; ++i) {
      sum[i] = vdupq_n_s32(0);
      __asm__ volatile("" : "+w"(sum[i]));  // chains of equal value would be one
    }
    for (int64_t n = 0; n < iterations * kUnrolled; ++n) {
      __asm__ volatile("" : "+w"(w), "+w"(x));
#pragma GCC unroll 24
      for (int i = 0; i < kChains; ++i) sum[i] = vmmlaq_s32(sum[i], x, w);
    }
#pragma GCC unroll 24
    for (int i = 0; i < kChains; ++i) __asm__ volatile("" : : "w"(sum[i]));
    return iterations * kUnrolled * kChains * 32;
  }

  template <class Epilogue>
  static INT8MOE_INLINE void gemm(const GemmBlock<kPanels>& block, Epilogue&& epilogue) {
    alignas(64) int32_t acc[kPanels * kRows * 8];
    // From the start of the first pair on, of which `rows_before` rows are another expert's.
    const int64_t all = block.rows_before + block.rows;
    for (int64_t r0 = 0; r0 < all; r0 += kRows) {
      const int rows = static_cast<int>(all - r0 < kRows ? all - r0 : kRows);
      const uint8_t* const pairs = block.rows_base + r0 * block.row_stride;
      switch ((rows + 1) / 2) {
        case 1: all_panels<1>(block, pairs, acc); break;
        case 2: all_panels<2>(block, pairs, acc); break;
        case 3: all_panels<3>(block, pairs, acc); break;
        case 4: all_panels<4>(block, pairs, acc); break;
        case 5: all_panels<5>(block, pairs, acc); break;
        default: all_panels<6>(block, pairs, acc); break;
      }
      const int before = r0 == 0 ? static_cast<int>(block.rows_before) : 0;
      epilogue(r0 + before - block.rows_before, rows - before, acc + before * 8);
    }
  }
};

}  // namespace
}  // namespace int8moe

INT8MOE_DEFINE_TIER(i8mm, int8moe::I8mmKernel)
