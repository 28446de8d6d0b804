// The tile that tiers vx and vxe share: signed bytes times signed bytes with what the vector facility of z13 has.
//
// | intrinsic                    | instruction | does                                                      |
// |------------------------------|-------------|-----------------------------------------------------------|
// | vec_meadd (signed char)      | VMAEB       | 8 products of the even bytes, added to 16-bit lanes       |
// | vec_moadd (signed char)      | VMAOB       | the same with the odd bytes                               |
// | vec_sum4 (unsigned short)    | VSUMH       | the two unsigned 16-bit lanes of each word, added up      |
// | + (unsigned int)             | VAF         | 4 sums                                                    |
// | vec_splats (from memory)     | VLREPF      | 4 bytes of a row of activations, in every word            |
//
// Layout: a panel step is 64 bytes, 16 columns x 4 depths, so 4 vectors of 4 columns, in the order of memory:
//
//     c0 k0..3 | c1 k0..3 | c2 k0..3 | c3 k0..3        even bytes k0 k2, odd bytes k1 k3
//
// Exactness: a lane of 16 bits takes two products, one even and one odd, whose sum lies in [-32512, 32768]: it can pass
// 32767, with -128 * -128 twice, and the machine has no signed sum across lanes. Both are mended by one constant: lanes
// start from 32640, so that they lie in [128, 65408], which unsigned 16 bits hold, and VSUMH reads them so. Each step then
// adds 2 * 32640 too much to every word; the words start from minus what all steps will add, and wrap.
//
// So 16 multiply-adds take 4 instructions, none of which needs the one before of the same accumulator but VAF. The other
// way, bytes widened to 16 bits and VMAEH / VMAOH into 32, takes as many multiplications, all of them in one chain, and
// the unpacking on top.
//
// Blocking: 4 rows x 1 panel are 16 accumulators, 4 activations, 1 weight, 2 constants and 2 temporaries of 32 registers.
// More rows would read weights less often, but loads are 8 of 72 instructions of a step already. A cache line is 256 bytes,
// which is 4 steps: the inner loop, with one prefetch. All of this is reasoned; the tiers have run in emulation only.
#ifndef INT8MOE_S390X_TILE_VX_H
#define INT8MOE_S390X_TILE_VX_H

#include <int8moe/driver.h>
#include <vecintrin.h>

#include "layout.h"

namespace int8moe {
namespace {

struct VxKernel {
  using Layout = S390xLayout;
  static constexpr int kRows = 4;
  static constexpr int kPanels = 4;
  static constexpr int64_t kRowBytes = 1;
  static constexpr bool kSortedRows = false;
  static constexpr int64_t kLine = 256;
  static constexpr int64_t kAhead = 8 * kLine;  // in the stream of weights
  static constexpr int kVectors = Layout::kColumns / 4;
  static constexpr int kBias = 32640;

  typedef __vector signed char Bytes;
  typedef __vector signed short Shorts;
  typedef __vector unsigned int Sums;

  static INT8MOE_INLINE void prepare(const int8_t q[64], uint8_t* row, int64_t k0) {
    __builtin_memcpy(row + k0, q, 64);
  }

  static INT8MOE_INLINE Bytes broadcast(const uint8_t* row) {
    uint32_t four;
    __builtin_memcpy(&four, row, 4);
    return (Bytes)vec_splats(four);
  }

  // The empty statement keeps the compiler from adding the products of several steps first, which needs more registers than
  // there are: 16 accumulating chains in place, nothing spilled.
  static INT8MOE_INLINE void add_products(Sums& sum, Bytes weights, Bytes activations) {
    const Shorts even = vec_meadd(weights, activations, vec_splats(static_cast<signed short>(kBias)));
    const Shorts both = vec_moadd(weights, activations, even);
    sum += vec_sum4((__vector unsigned short)both, vec_splats(static_cast<unsigned short>(0)));
    __asm__("" : "+v"(sum));
  }

  // Every loop but the one over lines is unrolled, or the accumulators would live in memory.
  template <int kTileRows>
  static INT8MOE_NOINLINE void tile(const uint8_t* panel, int64_t ahead, const uint8_t* const* row, int64_t depth,
                                    int32_t* acc) {
    const uint32_t added = static_cast<uint32_t>(depth / Layout::kDepth) * (2 * kBias);
    Sums sum[kTileRows][kVectors];
    const uint8_t* a[kTileRows];
#pragma GCC unroll 4
    for (int r = 0; r < kTileRows; ++r) {
      a[r] = row[r];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[r][v] = vec_splats(0u - added);
    }
    for (int64_t k = 0; k < depth; k += kLine / Layout::kColumns) {
      const uint8_t* const line = panel + k * Layout::kColumns;
      __builtin_prefetch(line + ahead);
#pragma GCC unroll 4
      for (int i = 0; i < kLine / Layout::kColumns; i += Layout::kDepth) {
        Bytes x[kTileRows];
#pragma GCC unroll 4
        for (int r = 0; r < kTileRows; ++r) x[r] = broadcast(a[r] + k + i);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          const Bytes w = load<Bytes>(line + i * Layout::kColumns + v * 16);
#pragma GCC unroll 4
          for (int r = 0; r < kTileRows; ++r) add_products(sum[r][v], w, x[r]);
        }
        __asm__ volatile("" : : : "memory");  // or the loads of all steps would be made first, and spilled
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kTileRows; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) store(acc + r * Layout::kColumns + v * 4, sum[r][v]);
  }

  // The instructions of a tile on registers, 16 chains.
  static INT8MOE_NOINLINE int64_t peak(int64_t iterations) {
    constexpr int kChains = 16, kUnrolled = 8;
    Sums sum[kChains];
    Bytes w = vec_splats(static_cast<signed char>(3)), x = vec_splats(static_cast<signed char>(5));
#pragma GCC unroll 16
    for (int i = 0; i < kChains; ++i) {
      sum[i] = vec_splats(0u);
      __asm__ volatile("" : "+v"(sum[i]));  // chains of equal value would be one
    }
    for (int64_t n = 0; n < iterations * kUnrolled; ++n) {
#pragma GCC unroll 16
      for (int i = 0; i < kChains; ++i) {
        __asm__ volatile("" : "+v"(w), "+v"(x));  // or one product would serve all chains
        add_products(sum[i], w, x);
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < kChains; ++i) __asm__ volatile("" : : "v"(sum[i]));
    return iterations * kUnrolled * kChains * 16;
  }

  template <class Epilogue>
  static INT8MOE_INLINE void gemm(const GemmBlock<kPanels>& block, Epilogue&& epilogue) {
    alignas(64) int32_t acc[kPanels * kRows * Layout::kColumns];
    const uint8_t* row[kRows];
    for (int64_t r0 = 0; r0 < block.rows; r0 += kRows) {
      const int rows = static_cast<int>(block.rows - r0 < kRows ? block.rows - r0 : kRows);
      for (int r = 0; r < rows; ++r) row[r] = block.row(r0 + r);
      // The last of several passes over the panels fetches the panels that come next; the others, their own stream.
      const bool fetch_next = r0 > 0 && r0 + kRows >= block.rows;
      for (int p = 0; p < block.panels; ++p) {
        const int64_t ahead = fetch_next ? block.to_panel_after(p) : kAhead;
        int32_t* const out = acc + p * kRows * Layout::kColumns;
        switch (rows) {
          case 1: tile<1>(block.panel[p], ahead, row, block.depth, out); break;
          case 2: tile<2>(block.panel[p], ahead, row, block.depth, out); break;
          case 3: tile<3>(block.panel[p], ahead, row, block.depth, out); break;
          default: tile<4>(block.panel[p], ahead, row, block.depth, out); break;
        }
      }
      epilogue(r0, rows, acc);
    }
  }
};

}  // namespace
}  // namespace int8moe
#endif
