// Packed weights: panels of kColumns output channels, in groups of kDepth depths.
//
//   [half][N / kColumns][K / kDepth][kColumns][kDepth] bytes, each weight + kOffset
//
// K is padded to a multiple of 64 and N of each half to a multiple of kColumns; padding is written (weight 0).
// A matrix that needs no padding keeps its byte count, and panel p then covers exactly the bytes of the rows it
// is made of: it is packed in place, one panel in a temporary. Else a whole expert goes through a temporary.
#ifndef INT8MOE_PANELS_H
#define INT8MOE_PANELS_H

#include <stdint.h>

#include "microkernel.h"
#include "transpose.h"

namespace int8moe {
namespace {

constexpr int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

template <int kColumnsOfPanel, int kDepthOfGroup, int kOffsetOfWeights>
struct PanelLayout {
  static constexpr int kColumns = kColumnsOfPanel;
  static constexpr int kDepth = kDepthOfGroup;
  static constexpr int kOffset = kOffsetOfWeights;  // 0 or 128
  static_assert(kOffset == 0 || kOffset == 128, "weights are stored as they are, or as unsigned w + 128");
  static_assert(kDepthUnit % kDepth == 0, "a group must divide the depth unit");

  static constexpr int64_t padded_depth(int64_t depth) { return round_up(depth, kDepthUnit); }
  static constexpr int64_t panel_count(int64_t rows) { return round_up(rows, kColumns) / kColumns; }
  static constexpr int64_t panel_bytes(int64_t depth) { return padded_depth(depth) * kColumns; }
  static constexpr int64_t half_bytes(int64_t rows, int64_t depth) {
    return panel_count(rows) * panel_bytes(depth);
  }
  static constexpr bool is_exact(int64_t rows, int64_t depth) {
    return rows % kColumns == 0 && depth % kDepthUnit == 0;
  }

  // `rows` (at most kColumns) canonical rows of `depth` bytes, `stride` apart -> one panel. The two must not overlap.
  static void pack_panel(const uint8_t* source, int64_t stride, int64_t rows, int64_t depth, uint8_t* panel) {
    const int64_t blocked = rows == kColumns ? depth / kBlock * kBlock : 0;
    for (int64_t k = 0; k < blocked; k += kBlock)
      for (int column = 0; column < kColumns; column += Block::kSide)
        Block::block(source + column * stride + k, stride, panel + k * kColumns + column * kDepth, kStep);
    // What is left at the edges, and the padding.
    for (int column = 0; column < kColumns; ++column)
      for (int64_t k = blocked; k < padded_depth(depth); ++k) {
        const bool inside = column < rows && k < depth;
        panel[at(column, k)] = static_cast<uint8_t>((inside ? source[column * stride + k] : 0) ^ kOffset);
      }
  }

  static void unpack_panel(const uint8_t* panel, int64_t rows, int64_t depth, uint8_t* target) {
    const int64_t blocked = rows == kColumns ? depth / kBlock * kBlock : 0;
    for (int64_t k = 0; k < blocked; k += kBlock)
      for (int column = 0; column < kColumns; column += Block::kSide)
        Block::block(panel + k * kColumns + column * kDepth, kStep, target + column * depth + k, depth);
    for (int column = 0; column < kColumns && column < rows; ++column)
      for (int64_t k = blocked; k < depth; ++k)
        target[column * depth + k] = static_cast<uint8_t>(panel[at(column, k)] ^ kOffset);
  }

 private:
  using Block = Transpose<kDepth, kOffset>;
  static constexpr int64_t kBlock = 16;                  // depths of one transposed block
  static constexpr int64_t kStep = kColumns * kDepth;    // bytes from one group of depths to the next
  static_assert(kColumns % Block::kSide == 0, "a panel is whole blocks");
  static int64_t at(int64_t column, int64_t k) { return k / kDepth * kStep + column * kDepth + k % kDepth; }
};

// Packs or unpacks one expert in its own storage. `temporary` holds temporary_bytes().
template <class Layout>
struct ExpertPacker {
  int64_t halves, rows, depth;

  bool in_place() const { return Layout::is_exact(rows, depth); }
  int64_t canonical_bytes() const { return halves * rows * depth; }
  int64_t packed_bytes() const { return halves * Layout::half_bytes(rows, depth); }
  int64_t temporary_bytes() const { return in_place() ? Layout::kColumns * apart() : canonical_bytes(); }

  void pack(uint8_t* expert, uint8_t* temporary) const { each_panel<true>(expert, temporary); }
  void unpack(uint8_t* expert, uint8_t* temporary) const {
    if (in_place()) return each_panel<false>(expert, temporary);
    // The canonical form is never larger: build it aside, then put it in front.
    for (int64_t half = 0; half < halves; ++half)
      for (int64_t p = 0; p < Layout::panel_count(rows); ++p)
        Layout::unpack_panel(panel(expert, half, p), rows_of(p), depth, temporary + canonical_at(half, p));
    __builtin_memcpy(expert, temporary, static_cast<size_t>(canonical_bytes()));
  }

 private:
  uint8_t* panel(uint8_t* expert, int64_t half, int64_t p) const {
    return expert + half * Layout::half_bytes(rows, depth) + p * Layout::panel_bytes(depth);
  }
  int64_t canonical_at(int64_t half, int64_t p) const { return (half * rows + p * Layout::kColumns) * depth; }
  int64_t rows_of(int64_t p) const {
    const int64_t left = rows - p * Layout::kColumns;
    return left < Layout::kColumns ? left : Layout::kColumns;
  }

  // Rows of one panel in the temporary: at a power-of-two distance they would all meet in a few sets of L1.
  int64_t apart() const { return depth + kDepthUnit; }

  template <bool kPack>
  void each_panel(uint8_t* expert, uint8_t* temporary) const {
    const bool whole = !in_place();
    if (whole) __builtin_memcpy(temporary, expert, static_cast<size_t>(canonical_bytes()));
    for (int64_t half = 0; half < halves; ++half)
      for (int64_t p = 0; p < Layout::panel_count(rows); ++p) {
        uint8_t* here = panel(expert, half, p);
        if (whole) {
          Layout::pack_panel(temporary + canonical_at(half, p), depth, rows_of(p), depth, here);
        } else if (kPack) {
          for (int64_t row = 0; row < Layout::kColumns; ++row)
            __builtin_memcpy(temporary + row * apart(), here + row * depth, static_cast<size_t>(depth));
          Layout::pack_panel(temporary, apart(), Layout::kColumns, depth, here);
        } else {
          __builtin_memcpy(temporary, here, static_cast<size_t>(Layout::panel_bytes(depth)));
          Layout::unpack_panel(temporary, Layout::kColumns, depth, here);
        }
      }
  }
};

}  // namespace
}  // namespace int8moe
#endif
