// Which rows each expert gets: a counting sort of (token, slot) by ascending global expert id.
//
// Slots whose id is negative, beyond num_experts, or mapped to no local expert are left out; their weights are
// never read. Within an expert rows stand in (token, slot) order, which with the ascending ids is the order of
// step 8 of docs/numerics.md.
#ifndef INT8MOE_ROUTING_H
#define INT8MOE_ROUTING_H

#include "float_formats.h"

namespace int8moe {
namespace {

// Rows [first, first + rows) of a chunk belong to local expert `local`. An expert with many rows has several entries, one
// after another, so that no task is large however skewed the routing is; its weights come from cache for all but the
// first.
constexpr int64_t kRowsOfEntry = 512;
struct ActiveExpert {
  int64_t local;
  int64_t first;
  int64_t rows;
};

struct Slots {
  const void* ids;
  int64_t row_stride, column_stride;
  int dtype;
  int64_t top_k;
  int64_t num_experts, local_experts;
  const int32_t* expert_map;

  // The global id of a slot, or -1 where it contributes nothing.
  int64_t expert(int64_t token, int64_t slot) const {
    const int64_t id = load_index(ids, token * row_stride + slot * column_stride, dtype);
    if (id < 0 || id >= num_experts) return -1;
    const int64_t local = local_of(id);
    return local >= 0 && local < local_experts ? id : -1;
  }
  int64_t local_of(int64_t id) const { return expert_map == nullptr ? id : expert_map[id]; }
};

struct RouterWeights {
  const void* data;
  int64_t row_stride, column_stride;
  int dtype;
  float at(int64_t token, int64_t slot) const {
    return load_scalar(data, token * row_stride + slot * column_stride, dtype);
  }
};

// Entries for `rows` more rows of an expert, appended to `active` from `count` on; returns the new count.
inline int64_t append_expert(int64_t local, int64_t first, int64_t rows, ActiveExpert* active, int64_t count) {
  for (int64_t done = 0; done < rows; done += kRowsOfEntry)
    active[count++] = {local, first + done, rows - done < kRowsOfEntry ? rows - done : kRowsOfEntry};
  return count;
}

// The most entries that `rows` rows of `experts` experts can need.
constexpr int64_t most_entries(int64_t rows, int64_t experts) {
  return (rows < experts ? rows : experts) + rows / kRowsOfEntry;
}

struct Routed {
  int64_t entries;  // of `active`
  int64_t rows;
};

// For tokens [token0, token0 + tokens): fills `active`, and for each row its token (relative to token0) and
// weight. `cursor` has num_experts entries. With unit_weights every weight is 1. Where `slot_row` is given, it gets
// for each (token, slot) its row, or -1.
inline Routed route(const Slots& slots, const RouterWeights& weights, bool unit_weights, int64_t token0,
                    int64_t tokens, int64_t* cursor, ActiveExpert* active, int32_t* row_token,
                    float* row_weight, int32_t* slot_row) {
  __builtin_memset(cursor, 0, static_cast<size_t>(slots.num_experts) * sizeof *cursor);
  for (int64_t token = 0; token < tokens; ++token)
    for (int64_t slot = 0; slot < slots.top_k; ++slot) {
      const int64_t id = slots.expert(token0 + token, slot);
      if (id >= 0) ++cursor[id];
    }
  Routed routed = {0, 0};
  for (int64_t id = 0; id < slots.num_experts; ++id) {
    const int64_t rows = cursor[id];
    cursor[id] = routed.rows;
    if (rows == 0) continue;
    routed.entries = append_expert(slots.local_of(id), routed.rows, rows, active, routed.entries);
    routed.rows += rows;
  }
  for (int64_t token = 0; token < tokens; ++token)
    for (int64_t slot = 0; slot < slots.top_k; ++slot) {
      const int64_t id = slots.expert(token0 + token, slot);
      const int64_t row = id < 0 ? -1 : cursor[id]++;
      if (slot_row != nullptr) slot_row[token * slots.top_k + slot] = static_cast<int32_t>(row);
      if (row < 0) continue;
      row_token[row] = static_cast<int32_t>(token);
      row_weight[row] = unit_weights ? 1.0f : weights.at(token0 + token, slot);
    }
  return routed;
}

}  // namespace
}  // namespace int8moe
#endif
