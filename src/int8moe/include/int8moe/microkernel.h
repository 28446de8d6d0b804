// The MicroKernel concept: what a tier writes, and nothing else of it is specific to an instruction set.
//
//   struct Kernel {
//     using Layout = PanelLayout<16, 4, 128>;    // how a matrix is packed, see panels.h
//     static constexpr int kRows = 4;            // most rows of one tile
//     static constexpr int kPanels = 4;          // panels given to one gemm call, even
//     static constexpr int64_t kRowBytes = 1;    // bytes that a prepared activation takes per depth
//     static constexpr bool kSortedRows = false; // whether gemm wants the rows of an expert one after another: then
//                                                // row_index is null, and kRows - 1 rows beyond the last are readable
//                                                // (with any contents), so that a tile may be loaded whole
//     static constexpr int kRowGroup = 2;        // optional, with kSortedRows: prepared rows that stand interleaved,
//                                                // see below
//
//     // Writes 64 quantised activations, depth k0 .. k0 + 63, into a prepared row: with kRowGroup, the pieces of
//     // the row that begins at `row`, kRowGroup pieces apart.
//     static void prepare(const int8_t q[64], uint8_t* row, int64_t k0);
//
//     // For every tile of up to kRows rows: int32 sums of activation * stored weight over the whole depth, and
//     // then epilogue(first_row, rows, acc), acc being [panel][kRows][Layout::kColumns].
//     template <class Epilogue>
//     static void gemm(const GemmBlock<kPanels>& block, Epilogue&& epilogue);
//
//     // For benchmarks: the fastest exact multiply-add of the instruction set, from registers or L1, `iterations`
//     // times round; returns the number of multiply-adds.
//     static int64_t peak(int64_t iterations);
//   };
//
// The sums are of *stored* weights: where Layout::kOffset is not 0 the epilogue takes kOffset * sum(q) of the
// row away, a number that was computed when the row was quantised. The epilogue is inlined, so a tier may run it
// between its tile instructions; all of its float operations are shared code, so the bits cannot differ.
//
// An instruction that multiplies several rows at once wants them side by side. With kRowGroup = G the rows
// g * G .. g * G + G - 1 of a matrix share G * row_stride bytes, in pieces of Layout::kDepth depths in turn:
//
//     row 0, piece 0 | row 1, piece 0 | row 0, piece 1 | row 1, piece 1 | ...          (G = 2)
//
// An expert's rows may begin within a group. So rows_base is the start of that group, and its first
// `rows_before` rows are another expert's: a tile may take them along, and drops their sums.
#ifndef INT8MOE_MICROKERNEL_H
#define INT8MOE_MICROKERNEL_H

#include <stddef.h>
#include <stdint.h>

namespace int8moe {
namespace {

constexpr int64_t kDepthUnit = 64;  // every reduction is padded to whole cache lines of int8

// Kernel::kRowGroup; 1, every row by itself, where a kernel does not say.
template <class Kernel>
constexpr auto row_group(int) -> decltype(Kernel::kRowGroup + 0) {
  return Kernel::kRowGroup;
}
template <class Kernel>
constexpr int row_group(long) {
  return 1;
}

// Between any two places in memory, also of different arrays.
inline int64_t distance(const uint8_t* from, const uint8_t* to) {
  return static_cast<int64_t>(reinterpret_cast<intptr_t>(to) - reinterpret_cast<intptr_t>(from));
}

template <int kMaxPanels>
struct GemmBlock {
  const uint8_t* panel[kMaxPanels];  // each Layout::kColumns * depth bytes
  int64_t next_offset;  // from each panel to the one that this worker will probably want after it: only a hint
  int panels;
  int64_t depth;             // padded, a multiple of kDepthUnit
  const uint8_t* rows_base;  // prepared rows
  int64_t row_stride;        // in bytes
  const int32_t* row_index;  // row r lies at rows_base + row_index[r] * row_stride; null: r itself
  int64_t rows;
  int64_t rows_before;  // with kRowGroup: rows of the first group that are not this expert's, else 0

  const uint8_t* row(int64_t r) const {
    return rows_base + (row_index == nullptr ? r : static_cast<int64_t>(row_index[r])) * row_stride;
  }
  // From panel p to the one after it in a walk panel by panel: of this block, then of the next. Less lies fetched in the
  // cache between its arrival and its use than with next_offset.
  int64_t to_panel_after(int p, int count = 1) const {
    return distance(panel[p], p + count < panels ? panel[p + count] : panel[0] + next_offset);
  }
};

}  // namespace
}  // namespace int8moe
#endif
