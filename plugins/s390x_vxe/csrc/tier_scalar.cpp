// Tier scalar: plain integers, for machines and guests without the vector facility.
//
// | C++                      | instruction | note                                     |
// |--------------------------|-------------|------------------------------------------|
// | int8_t -> int64_t        | LGB         | load byte, sign extended                 |
// | w0 + (w1 << 32)          | SLLG, AGR   | two columns in one register              |
// | pair * activation        | MSGF        | 64-bit product with a 32-bit in memory   |
//
// Layout: [K / 4][16 columns][4 depths]. Two columns share a 64-bit register, the first in its low half and the second 2^32
// times as heavy. A product with one activation then holds both products, and a sum of such products both sums:
//
//     total = sum0 + sum1 * 2^32 (mod 2^64)      sum0 = int32(total)      sum1 = int32((total - sum0) >> 32)
//
// which is exact as each sum fits int32. So two multiply-adds cost one multiplication. The pair is made once for all rows
// of a tile; activations are prepared as 32-bit integers, so that the multiplication reads its operand from memory.
//
// Blocking: 4 columns x 4 depths of one panel at a time for up to 3 rows: 2 x 3 sums of two columns, 2 pairs and 6 pointers
// fit 16 registers.
#if defined(__VX__)
#error "tier_scalar.cpp is built for machines without the vector facility: no -mvx, no -march=z13 or above"
#endif

#define INT8MOE_LANES 4
#include <int8moe/driver.h>

#include "layout.h"

namespace int8moe {
namespace {

struct ScalarKernel {
  using Layout = S390xLayout;
  static constexpr int kRows = 3;
  static constexpr int kPanels = 4;
  static constexpr int64_t kRowBytes = 4;
  static constexpr bool kSortedRows = false;

  static INT8MOE_INLINE void prepare(const int8_t q[64], uint8_t* row, int64_t k0) {
    int32_t wide[64];
    for (int i = 0; i < 64; ++i) wide[i] = q[i];
    __builtin_memcpy(row + k0 * kRowBytes, wide, sizeof wide);
  }

  // The weights of one depth of two neighbouring columns. Unsigned, as sums wrap.
  static INT8MOE_INLINE uint64_t pair(const uint8_t* weights) {
    const int64_t first = static_cast<int8_t>(weights[0]), second = static_cast<int8_t>(weights[Layout::kDepth]);
    return static_cast<uint64_t>(first) + (static_cast<uint64_t>(second) << 32);
  }

  static INT8MOE_INLINE uint64_t activation(const uint8_t* row, int64_t k) {
    int32_t value;
    __builtin_memcpy(&value, row + k * kRowBytes, sizeof value);
    return static_cast<uint64_t>(static_cast<int64_t>(value));
  }

  static INT8MOE_INLINE void split(uint64_t total, int32_t* out) {
    const int32_t low = static_cast<int32_t>(static_cast<uint32_t>(total));
    out[0] = low;
    out[1] = static_cast<int32_t>(static_cast<uint32_t>((total - static_cast<uint64_t>(int64_t{low})) >> 32));
  }

  template <int kTileRows>
  static INT8MOE_NOINLINE void tile(const uint8_t* panel, const uint8_t* const* row, int64_t depth, int32_t* acc) {
    for (int column = 0; column < Layout::kColumns; column += 4) {
      uint64_t left[kTileRows] = {}, right[kTileRows] = {};  // columns 0 and 1, 2 and 3
      const uint8_t* weights = panel + column * Layout::kDepth;
      for (int64_t k = 0; k < depth; k += Layout::kDepth, weights += Layout::kColumns * Layout::kDepth) {
#pragma GCC unroll 4
        for (int i = 0; i < Layout::kDepth; ++i) {
          const uint64_t w01 = pair(weights + i), w23 = pair(weights + 2 * Layout::kDepth + i);
#pragma GCC unroll 3
          for (int r = 0; r < kTileRows; ++r) {
            const uint64_t x = activation(row[r], k + i);
            left[r] += w01 * x;
            right[r] += w23 * x;
          }
        }
      }
#pragma GCC unroll 3
      for (int r = 0; r < kTileRows; ++r) {
        split(left[r], acc + r * Layout::kColumns + column);
        split(right[r], acc + r * Layout::kColumns + column + 2);
      }
    }
  }

  // The tile on data that stays in L1.
  static INT8MOE_NOINLINE int64_t peak(int64_t iterations) {
    constexpr int64_t kDepth = 64;
    uint8_t panel[Layout::panel_bytes(kDepth)];
    alignas(64) uint8_t rows[kRows * kDepth * kRowBytes];
    int32_t acc[kRows * Layout::kColumns];
    const uint8_t* row[kRows];
    __builtin_memset(panel, 3, sizeof panel);
    __builtin_memset(rows, 0, sizeof rows);
    for (int r = 0; r < kRows; ++r) row[r] = rows + r * kDepth * kRowBytes;
    for (int64_t n = 0; n < iterations; ++n) {
      tile<kRows>(panel, row, kDepth, acc);
      __asm__ volatile("" : : "r"(acc) : "memory");
    }
    return iterations * kRows * Layout::kColumns * kDepth;
  }

  template <class Epilogue>
  static INT8MOE_INLINE void gemm(const GemmBlock<kPanels>& block, Epilogue&& epilogue) {
    alignas(64) int32_t acc[kPanels * kRows * Layout::kColumns];
    const uint8_t* row[kRows];
    for (int64_t r0 = 0; r0 < block.rows; r0 += kRows) {
      const int rows = static_cast<int>(block.rows - r0 < kRows ? block.rows - r0 : kRows);
      for (int r = 0; r < rows; ++r) row[r] = block.row(r0 + r);
      for (int p = 0; p < block.panels; ++p) {
        int32_t* const out = acc + p * kRows * Layout::kColumns;
        switch (rows) {
          case 1: tile<1>(block.panel[p], row, block.depth, out); break;
          case 2: tile<2>(block.panel[p], row, block.depth, out); break;
          default: tile<3>(block.panel[p], row, block.depth, out); break;
        }
      }
      epilogue(r0, rows, acc);
    }
  }
};

}  // namespace
}  // namespace int8moe

INT8MOE_DEFINE_TIER(scalar, int8moe::ScalarKernel)
