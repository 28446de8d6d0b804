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

  // `rows` (at most kColumns) canonical rows of `depth` bytes -> one panel. The two must not overlap.
  static void pack_panel(const uint8_t* source, int64_t rows, int64_t depth, uint8_t* panel) {
    const int64_t groups = padded_depth(depth) / kDepth;
    const int64_t whole = depth / kDepth;
    for (int column = 0; column < kColumns; ++column) {
      const uint8_t* row = source + column * depth;
      uint8_t* target = panel + column * kDepth;
      int64_t group = 0;
      if (column < rows) {
        for (; group < whole; ++group) move_group(row + group * kDepth, target + group * kColumns * kDepth);
        for (; group < groups; ++group)
          for (int d = 0; d < kDepth; ++d) {
            const int64_t k = group * kDepth + d;
            target[group * kColumns * kDepth + d] = static_cast<uint8_t>(k < depth ? row[k] ^ kOffset : kOffset);
          }
      } else {
        for (; group < groups; ++group)
          __builtin_memset(target + group * kColumns * kDepth, kOffset, kDepth);
      }
    }
  }

  static void unpack_panel(const uint8_t* panel, int64_t rows, int64_t depth, uint8_t* target) {
    const int64_t whole = depth / kDepth;
    for (int column = 0; column < kColumns && column < rows; ++column) {
      const uint8_t* source = panel + column * kDepth;
      uint8_t* row = target + column * depth;
      for (int64_t group = 0; group < whole; ++group)
        move_group(source + group * kColumns * kDepth, row + group * kDepth);
      for (int64_t k = whole * kDepth; k < depth; ++k)
        row[k] = static_cast<uint8_t>(source[whole * kColumns * kDepth + k - whole * kDepth] ^ kOffset);
    }
  }

 private:
  // w + 128 as unsigned is w with its top bit flipped, byte by byte: the same on either endianness.
  static inline __attribute__((always_inline)) void move_group(const uint8_t* source, uint8_t* target) {
    uint8_t group[kDepth];
    __builtin_memcpy(group, source, kDepth);
    for (int d = 0; d < kDepth; ++d) group[d] = static_cast<uint8_t>(group[d] ^ kOffset);
    __builtin_memcpy(target, group, kDepth);
  }
};

// Packs or unpacks one expert in its own storage. `temporary` holds temporary_bytes().
template <class Layout>
struct ExpertPacker {
  int64_t halves, rows, depth;

  bool in_place() const { return Layout::is_exact(rows, depth); }
  int64_t canonical_bytes() const { return halves * rows * depth; }
  int64_t packed_bytes() const { return halves * Layout::half_bytes(rows, depth); }
  int64_t temporary_bytes() const { return in_place() ? Layout::panel_bytes(depth) : canonical_bytes(); }

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

  template <bool kPack>
  void each_panel(uint8_t* expert, uint8_t* temporary) const {
    const bool whole = !in_place();
    if (whole) __builtin_memcpy(temporary, expert, static_cast<size_t>(canonical_bytes()));
    for (int64_t half = 0; half < halves; ++half)
      for (int64_t p = 0; p < Layout::panel_count(rows); ++p) {
        uint8_t* here = panel(expert, half, p);
        const uint8_t* source = temporary + (whole ? canonical_at(half, p) : 0);
        if (!whole) __builtin_memcpy(temporary, here, static_cast<size_t>(Layout::panel_bytes(depth)));
        if (kPack)
          Layout::pack_panel(source, rows_of(p), depth, here);
        else
          Layout::unpack_panel(source, rows_of(p), depth, here);
      }
  }
};

}  // namespace
}  // namespace int8moe
#endif
