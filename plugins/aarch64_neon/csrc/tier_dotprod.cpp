// Tier dotprod: signed 8-bit dot products of four (Armv8.2 FEAT_DotProd: Cortex-A55, A75, A76 and later, Neoverse N1,
// Apple A13, M1 and later).
//
// | intrinsic    | instruction             | latency, per cycle (Neoverse N1 / V1) |
// |--------------|-------------------------|---------------------------------------|
// | vdotq_s32    | sdot v.4s, v.16b, v.16b | 3 (1 to the next sum), 2 / 4          |
// | vld1q_s8     | ldr q                   | 5 / 6, 2 / 3                          |
//
// Layout: a vector of weights is two columns x 8 depths, so with 8 activations in both halves (repeated_rows.h)
//
//     sum = c0: k0..3 | c0: k4..7 | c1: k0..3 | c1: k4..7
//
// and one pairwise addition of two such sums at the end gives four columns.
//
// Blocking, for 32 registers: two sdot per cycle of latency 3, of which the sum needs the last only.
//
//     rows  panels  sums  registers                       loads per step / sdot
//        6       1    24  + 4 weights + 2 activations          10 / 24
//     4, 5       1  16, 20                                   8, 9 / 16, 20
//        3       2    24  + 2 weights + 3 activations          11 / 24
//        2       3    24                                       14 / 24
//        1       4    16                                       17 / 16
//
// With one or two rows a call is bound by memory, and several streams of weights keep more lines in flight than one.
// All of this is reasoned, and what a scheduling model of LLVM says of it (benchmarks/static_cycles.py).
#if !defined(__ARM_FEATURE_DOTPROD)
#error "tier_dotprod.cpp needs -march=armv8.2-a+dotprod"
#endif
#if defined(__ARM_FEATURE_MATMUL_INT8) || defined(__ARM_FEATURE_SVE)
#error "tier_dotprod.cpp is built for dot products and nothing above: no +i8mm, no +sve"
#endif

#define INT8MOE_LANES 4
#include <arm_neon.h>
#include <int8moe/driver.h>

#include "layout.h"
#include "repeated_rows.h"

namespace int8moe {
namespace {

struct DotprodKernel {
  using Layout = Aarch64Layout;
  static constexpr int kRows = 6;
  static constexpr int kPanels = 8;
  static constexpr int64_t kRowBytes = kRepeats;
  static constexpr bool kSortedRows = false;

  static INT8MOE_INLINE void prepare(const int8_t q[64], uint8_t* row, int64_t k0) { prepare_repeated(q, row, k0); }

  static INT8MOE_INLINE int8x16_t load_bytes(const uint8_t* p) { return vreinterpretq_s8_u8(vld1q_u8(p)); }
  // What is loaded behind it stays behind it. Or the compiler would load a step's operands first, and spill sums for them.
  static INT8MOE_INLINE void hold_loads() { __asm__ volatile("" : : : "memory"); }

  // Every loop but the one over depth is unrolled, or the sums would live in memory.
  template <int kTileRows, int kTilePanels>
  static INT8MOE_NOINLINE void tile(const uint8_t* const* panel, const uint8_t* const* row, int64_t depth,
                                    int32_t* acc) {
    int32x4_t sum[kTileRows][kTilePanels][4];
    const uint8_t* a[kTileRows];
    const uint8_t* b[kTilePanels];
#pragma GCC unroll 6
    for (int r = 0; r < kTileRows; ++r) {
      a[r] = row[r];
#pragma GCC unroll 16
      for (int i = 0; i < 4 * kTilePanels; ++i) sum[r][i / 4][i % 4] = vdupq_n_s32(0);
    }
#pragma GCC unroll 4
    for (int p = 0; p < kTilePanels; ++p) b[p] = panel[p];
    for (int64_t k = 0; k < depth; k += 8) {
      int8x16_t x[kTileRows];
      if constexpr (kTilePanels == 1) {
        int8x16_t w[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) w[i] = load_bytes(b[0] + k * 8 + i * 16);
#pragma GCC unroll 6
        for (int r = 0; r < kTileRows; ++r) {
          if (r % 2 == 0) hold_loads();
          x[r] = load_bytes(a[r] + k * kRepeats);
#pragma GCC unroll 4
          for (int i = 0; i < 4; ++i) sum[r][0][i] = vdotq_s32(sum[r][0][i], w[i], x[r]);
        }
      } else {
#pragma GCC unroll 6
        for (int r = 0; r < kTileRows; ++r) x[r] = load_bytes(a[r] + k * kRepeats);
#pragma GCC unroll 16
        for (int i = 0; i < 4 * kTilePanels; ++i) {
          if (i % 2 == 0) hold_loads();
          const int8x16_t w = load_bytes(b[i / 4] + k * 8 + i % 4 * 16);
#pragma GCC unroll 6
          for (int r = 0; r < kTileRows; ++r) sum[r][i / 4][i % 4] = vdotq_s32(sum[r][i / 4][i % 4], w, x[r]);
        }
      }
    }
#pragma GCC unroll 4
    for (int p = 0; p < kTilePanels; ++p)
#pragma GCC unroll 6
      for (int r = 0; r < kTileRows; ++r) {
        int32_t* const out = acc + (p * kRows + r) * 8;
        vst1q_s32(out, vpaddq_s32(sum[r][p][0], sum[r][p][1]));
        vst1q_s32(out + 4, vpaddq_s32(sum[r][p][2], sum[r][p][3]));
      }
  }

  // Groups of kTilePanels panels, from panel `first` on; returns the first panel that is left.
  template <int kTileRows, int kTilePanels>
  static INT8MOE_INLINE int tiles(const GemmBlock<kPanels>& block, int first, const uint8_t* const* row,
                                  int32_t* acc) {
    int p = first;
    for (; p + kTilePanels <= block.panels; p += kTilePanels)
      tile<kTileRows, kTilePanels>(block.panel + p, row, block.depth, acc + p * kRows * 8);
    return p;
  }

  template <int kTileRows>
  static INT8MOE_INLINE void all_panels(const GemmBlock<kPanels>& block, const uint8_t* const* row, int32_t* acc) {
    int p = 0;
    if constexpr (kTileRows == 1) p = tiles<kTileRows, 4>(block, p, row, acc);
    if constexpr (kTileRows == 2) p = tiles<kTileRows, 3>(block, p, row, acc);
    if constexpr (kTileRows <= 3) p = tiles<kTileRows, 2>(block, p, row, acc);
    tiles<kTileRows, 1>(block, p, row, acc);
  }

  // sdot on registers, 24 chains.
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
      for (int i = 0; i < kChains; ++i) sum[i] = vdotq_s32(sum[i], w, x);
    }
#pragma GCC unroll 24
    for (int i = 0; i < kChains; ++i) __asm__ volatile("" : : "w"(sum[i]));
    return iterations * kUnrolled * kChains * 16;
  }

  template <class Epilogue>
  static INT8MOE_INLINE void gemm(const GemmBlock<kPanels>& block, Epilogue&& epilogue) {
    alignas(64) int32_t acc[kPanels * kRows * 8];
    const uint8_t* row[kRows];
    for (int64_t r0 = 0; r0 < block.rows; r0 += kRows) {
      const int rows = static_cast<int>(block.rows - r0 < kRows ? block.rows - r0 : kRows);
      for (int r = 0; r < rows; ++r) row[r] = block.row(r0 + r);
      switch (rows) {
        case 1: all_panels<1>(block, row, acc); break;
        case 2: all_panels<2>(block, row, acc); break;
        case 3: all_panels<3>(block, row, acc); break;
        case 4: all_panels<4>(block, row, acc); break;
        case 5: all_panels<5>(block, row, acc); break;
        default: all_panels<6>(block, row, acc); break;
      }
      epilogue(r0, rows, acc);
    }
  }
};

}  // namespace
}  // namespace int8moe

INT8MOE_DEFINE_TIER(dotprod, int8moe::DotprodKernel)
