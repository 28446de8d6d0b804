// The kernel driver: docs/numerics.md from hidden states to output, over the MicroKernel of a tier.
//
// Per chunk of tokens (all of them, unless scratch memory would pass its bound):
//   0  sort (token, slot) by expert                                     routing.h, serial
//   1  quantise token rows, once each; for a MicroKernel that wants sorted rows, into each of its experts' rows
//   2  GEMM1 over (expert, block of columns): gate and up panels side by side, dequantise, activate, fp32 h
//   3  quantise the rows of h
//   4  GEMM2 over blocks of output columns, each through *all* experts in ascending global id, summed per token
//      in fp32 in a block that stays in the worker's cache; rounded once to the output dtype at the end.
// So step 8 keeps its order without an [M * k, H] intermediate, an expert's weights are read once per chunk for
// all of its rows, and no bit depends on the number of workers. Each phase is one parallel region, or runs in
// the calling thread when it is small.
#ifndef INT8MOE_DRIVER_H
#define INT8MOE_DRIVER_H

#include "abi.h"
#include "arena.h"
#include "epilogue.h"
#include "float_formats.h"
#include "limits.h"
#include "microkernel.h"
#include "numerics.h"
#include "panels.h"
#include "parallel.h"
#include "quantize.h"
#include "routing.h"
#include "runtime.h"
#include "vectors.h"

namespace int8moe {
namespace {

// Below these a phase costs less than waking another thread.
constexpr int64_t kSerialElements = 64 * 1024;
constexpr int64_t kSerialProducts = 1024 * 1024;
// Tasks are handed out one by one; this many for each worker keep the last ones from idling.
constexpr int kTasksPerWorker = 4;

template <class Kernel>
class Driver {
  using Layout = typename Kernel::Layout;
  using Finish = Epilogue<Kernel>;
  static constexpr int kColumns = Layout::kColumns;
  static constexpr int kPanels = Kernel::kPanels;
  static constexpr int kRows = Kernel::kRows;
  static constexpr int kBlock = kPanels * kColumns;
  static constexpr int64_t kSpareRows = Kernel::kSortedRows ? kRows - 1 : 0;
  static constexpr int kGroup = row_group<Kernel>(0);
  static constexpr int64_t kPiece = Layout::kDepth * Kernel::kRowBytes;  // bytes of a row that stand together
  static_assert(kColumns % kLanes == 0 && kPanels % 2 == 0, "whole vectors per panel, gate and up in pairs");
  static_assert(kGroup == 1 || Kernel::kSortedRows, "rows are interleaved with others of their expert");

 public:
  static int32_t forward(const int8moe_runtime* runtime, const int8moe_layer* layer, const int8moe_call* call) {
    if (call->struct_bytes != sizeof *call) return INT8MOE_ERROR_VERSION;
    if (const int32_t fault = fault_of(layer)) return fault;
    if (call->tokens < 0 || call->top_k < 0 || call->x_dtype < INT8MOE_F32 || call->x_dtype > INT8MOE_F16 ||
        call->weights_dtype < INT8MOE_F32 || call->weights_dtype > INT8MOE_F16 ||
        (call->ids_dtype != INT8MOE_I32 && call->ids_dtype != INT8MOE_I64))
      return INT8MOE_ERROR_ARGUMENT;
    if (call->tokens == 0) return INT8MOE_OK;
    Driver driver(runtime, layer, call->workers);
    driver.top_k_ = call->top_k;
    driver.x_ = call->x;
    driver.x_row_stride_ = call->x_row_stride;
    driver.x_column_stride_ = call->x_column_stride;
    driver.x_dtype_ = call->x_dtype;
    driver.out_ = static_cast<char*>(call->out);
    driver.slots_ = {call->ids,   call->ids_row_stride, call->ids_column_stride, call->ids_dtype,
                     call->top_k, layer->num_experts,   layer->local_experts,    layer->expert_map};
    driver.weights_ = {call->weights, call->weights_row_stride, call->weights_column_stride, call->weights_dtype};
    return driver.in_chunks(call->tokens);
  }

  static int32_t forward_rows(const int8moe_runtime* runtime, const int8moe_layer* layer,
                              const int8moe_rows_call* call) {
    if (call->struct_bytes != sizeof *call) return INT8MOE_ERROR_VERSION;
    if (const int32_t fault = fault_of(layer)) return fault;
    if (call->rows < 0 || call->x_dtype < INT8MOE_F32 || call->x_dtype > INT8MOE_I8 ||
        (call->x_dtype == INT8MOE_I8 && call->row_scales == nullptr && call->rows > 0) ||
        (call->counts_dtype != INT8MOE_I32 && call->counts_dtype != INT8MOE_I64))
      return INT8MOE_ERROR_ARGUMENT;
    int64_t rows = 0;
    for (int64_t e = 0; e < layer->local_experts; ++e) {
      const int64_t count = load_index(call->counts, e * call->counts_stride, call->counts_dtype);
      if (count < 0 || count > call->rows - rows) return INT8MOE_ERROR_ARGUMENT;
      rows += count;
    }
    if (rows == 0) return INT8MOE_OK;
    Driver driver(runtime, layer, call->workers);
    driver.rows_call_ = call;
    driver.top_k_ = 1;
    driver.x_ = call->x;
    driver.x_row_stride_ = call->x_row_stride;
    driver.x_column_stride_ = call->x_column_stride;
    driver.x_dtype_ = call->x_dtype;
    driver.out_ = reinterpret_cast<char*>(call->out);
    return driver.in_chunks(rows);
  }

 private:
  Driver(const int8moe_runtime* runtime, const int8moe_layer* layer, int32_t bound)
      : runtime_(runtime),
        layer_(layer),
        workers_(worker_count(runtime, bound)),
        gated_(is_gated(layer->activation)),
        hidden_(layer->hidden_size),
        inner_(layer->intermediate_size),
        depth1_(Layout::padded_depth(hidden_)),
        depth2_(Layout::padded_depth(inner_)),
        panels1_(Layout::panel_count(inner_)),
        panels2_(Layout::panel_count(hidden_)),
        // An odd number of cache lines: rows at a power-of-two stride would meet in a few sets of L1.
        stride1_(round_up(depth1_ * Kernel::kRowBytes, 64) | 64),
        stride2_(round_up(depth2_ * Kernel::kRowBytes, 64) | 64) {}

  static int32_t fault_of(const int8moe_layer* layer) {
    if (layer->struct_bytes != sizeof *layer || layer->driver_version != INT8MOE_DRIVER_VERSION)
      return INT8MOE_ERROR_VERSION;
    const bool usable = layer->activation >= 0 && layer->activation < INT8MOE_ACTIVATION_COUNT &&
                        layer->hidden_size > 0 && layer->intermediate_size > 0 &&
                        layer->hidden_size <= INT8MOE_MAX_REDUCTION &&
                        layer->intermediate_size <= INT8MOE_MAX_REDUCTION &&
                        (layer->local_experts == 0 || (layer->w13 != nullptr && layer->w2 != nullptr &&
                                                       layer->w13_scale != nullptr && layer->w2_scale != nullptr));
    return usable ? INT8MOE_OK : INT8MOE_ERROR_ARGUMENT;
  }

  int64_t lay_out(void* base, int64_t tokens) {
    const int64_t rows = tokens * top_k_;
    const bool by_rows = rows_call_ != nullptr;
    const int64_t experts = by_rows ? layer_->local_experts : layer_->num_experts;
    Arena arena(base);
    active_ = arena.take<ActiveExpert>(most_entries(rows, experts));
    cursor_ = arena.take<int64_t>(by_rows ? 0 : experts);
    row_token_ = arena.take<int32_t>(by_rows ? 0 : rows);
    row_weight_ = arena.take<float>(by_rows ? 0 : rows);
    slot_row_ = arena.take<int32_t>(Kernel::kSortedRows && !by_rows ? rows : 0);
    scale1_ = arena.take<RowScale>(tokens);
    scale2_ = arena.take<RowScale>(rows);
    wide_ = arena.take<float>(depth1_ * workers_);
    sums_ = arena.take<float>(by_rows ? 0 : tokens * kBlock * workers_);
    q1_ = arena.take<uint8_t>(round_up((Kernel::kSortedRows ? rows : tokens) + kSpareRows, kGroup) * stride1_);
    q2_ = arena.take<uint8_t>(round_up(rows + kSpareRows, kGroup) * stride2_);
    h_ = arena.take<float>(rows * depth2_);
    return arena.used();
  }

  int32_t in_chunks(int64_t tokens) {
    int64_t limit = runtime_->scratch_limit;
    if (limit <= 0) {
      const int64_t by_workers = int64_t{64} * workers_, least = 256;
      limit = (by_workers > least ? by_workers : least) << 20;
    }
    int64_t chunk = tokens;
    while (chunk > 1 && lay_out(nullptr, chunk) > limit) chunk = (chunk + 1) / 2;
    void* block = runtime_->acquire(lay_out(nullptr, chunk));
    if (block == nullptr) return INT8MOE_ERROR_MEMORY;
    lay_out(block, chunk);
    for (token0_ = 0; token0_ < tokens; token0_ += chunk) {
      tokens_ = tokens - token0_ < chunk ? tokens - token0_ : chunk;
      one_chunk();
    }
    runtime_->release(block);
    return INT8MOE_OK;
  }

  void one_chunk() {
    const Routed routed =
        rows_call_ != nullptr
            ? slice_of_counts()
            : route(slots_, weights_, layer_->router_weight_on_input != 0, token0_, tokens_, cursor_, active_,
                    row_token_, row_weight_, Kernel::kSortedRows ? slot_row_ : nullptr);
    entries_ = routed.entries;
    rows_ = routed.rows;
    const int64_t products = rows_ * hidden_ * inner_;
    gemm_workers_ = products < kSerialProducts ? 1 : workers_;
    group1_ = panels_of_task(panels1_, entries_, gated_ ? kPanels / 2 : kPanels);
    group2_ = panels_of_task(panels2_, 1, kPanels);
    if (rows_ > 0) {
      rows_per_task_ = rows_of_task(hidden_);
      run_region(runtime_, workers_for(tokens_ * hidden_), ceil_div(tokens_, rows_per_task_), quantize_tokens, this);
      run_region(runtime_, gemm_workers_, gemm1_tasks(), gemm1_function(), this, kAhead);
      rows_per_task_ = rows_of_task(inner_);
      run_region(runtime_, workers_for(rows_ * inner_), ceil_div(rows_, rows_per_task_), quantize_hidden, this);
    }
    run_region(runtime_, gemm_workers_, ceil_div(panels2_, group2_), gemm2_task, this);
  }

  // Where a prepared row begins.
  static uint8_t* prepared_row(uint8_t* base, int64_t row, int64_t stride) {
    return base + row / kGroup * kGroup * stride + row % kGroup * kPiece;
  }
  // An expert's rows, in the terms of GemmBlock.
  static void set_sorted_rows(GemmBlock<kPanels>& block, const ActiveExpert& expert, const uint8_t* base,
                              int64_t stride) {
    block.rows_before = expert.first % kGroup;
    block.rows_base = base + (expert.first - block.rows_before) * stride;
    block.row_index = nullptr;
  }

  static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
  int64_t gemm1_tasks() const { return entries_ * ceil_div(panels1_, group1_); }
  // Panels of one task: as many as a block holds, fewer where there would not be enough tasks for every worker.
  int panels_of_task(int64_t panels, int64_t entries, int most) const {
    while (most > 1 && entries * ceil_div(panels, most) < int64_t{kTasksPerWorker} * gemm_workers_) most /= 2;
    return most;
  }
  static int64_t rows_of_task(int64_t width) {
    const int64_t rows = kSerialElements / 4 / width;
    return rows < 1 ? 1 : rows;
  }
  int workers_for(int64_t elements) const { return elements < kSerialElements ? 1 : workers_; }

  // The part of the callers' counts that falls into this chunk of rows.
  Routed slice_of_counts() {
    Routed routed = {0, 0};
    int64_t start = 0;
    for (int64_t e = 0; e < layer_->local_experts && start < token0_ + tokens_; ++e) {
      const int64_t stop =
          start + load_index(rows_call_->counts, e * rows_call_->counts_stride, rows_call_->counts_dtype);
      const int64_t first = start > token0_ ? start : token0_;
      const int64_t last = stop < token0_ + tokens_ ? stop : token0_ + tokens_;
      routed.entries = append_expert(e, first - token0_, last - first, active_, routed.entries);
      start = stop;
    }
    routed.rows = tokens_;
    return routed;
  }

  static void quantize_tokens(void* context, int64_t task, int64_t, int worker) {
    Driver& d = *static_cast<Driver*>(context);
    const int64_t first = task * d.rows_per_task_;
    const int64_t last = first + d.rows_per_task_ < d.tokens_ ? first + d.rows_per_task_ : d.tokens_;
    for (int64_t token = first; token < last; ++token) {
      float* const wide = d.wide_ + worker * d.depth1_;
      if (Kernel::kSortedRows && d.rows_call_ == nullptr)
        d.quantize_into_slots(token, wide);
      else
        d.quantize_token(token, prepared_row(d.q1_, token, d.stride1_), wide);
    }
  }

  // Into the token's first row, and from there into its others.
  void quantize_into_slots(int64_t token, float* wide) {
    const uint8_t* first = nullptr;
    for (const int32_t* row = slot_row_ + token * top_k_; row != slot_row_ + (token + 1) * top_k_; ++row) {
      if (*row < 0) continue;
      uint8_t* const prepared = prepared_row(q1_, *row, stride1_);
      if (first != nullptr) {
        copy_prepared(prepared, first, depth1_);
        continue;
      }
      quantize_token(token, prepared, wide);
      first = prepared;
    }
  }

  static void copy_prepared(uint8_t* to, const uint8_t* from, int64_t depth) {
    const int64_t bytes = depth * Kernel::kRowBytes;
    if (kGroup == 1) {
      __builtin_memcpy(to, from, static_cast<size_t>(bytes));
      return;
    }
    for (int64_t at = 0; at < bytes * kGroup; at += kPiece * kGroup)
      __builtin_memcpy(to + at, from + at, static_cast<size_t>(kPiece));
  }

  void quantize_token(int64_t token, uint8_t* prepared, float* wide) {
    const int64_t source = token0_ + token;
    const void* row = static_cast<const char*>(x_) + source * x_row_stride_ * dtype_bytes(x_dtype_);
    if (x_dtype_ == INT8MOE_I8) {
      const int32_t compensation = prepare_int8_row<Kernel>(static_cast<const int8_t*>(row), x_column_stride_,
                                                            hidden_, depth1_, prepared);
      scale1_[token] = {rows_call_->row_scales[source * rows_call_->row_scales_stride], compensation};
      return;
    }
    const bool scaled = rows_call_ == nullptr && layer_->router_weight_on_input != 0;
    const float factor = scaled ? weights_.at(source, 0) : 1.0f;
    if (x_column_stride_ != 1) {
      widen_strided_row(x_dtype_, row, x_column_stride_, hidden_, depth1_, wide);
      if (scaled) widen_row<INT8MOE_F32, true>(wide, hidden_, depth1_, factor, wide);
    } else if (scaled) {
      widen_row_of<true>(x_dtype_, row, hidden_, depth1_, factor, wide);
    } else {
      widen_row_of<false>(x_dtype_, row, hidden_, depth1_, factor, wide);
    }
    scale1_[token] = quantize_row<Kernel>(wide, depth1_, prepared);
  }

  static void quantize_hidden(void* context, int64_t task, int64_t, int) {
    Driver& d = *static_cast<Driver*>(context);
    const int64_t first = task * d.rows_per_task_;
    const int64_t last = first + d.rows_per_task_ < d.rows_ ? first + d.rows_per_task_ : d.rows_;
    for (int64_t row = first; row < last; ++row)
      d.scale2_[row] =
          quantize_row<Kernel>(d.h_ + row * d.depth2_, d.depth2_, prepared_row(d.q2_, row, d.stride2_));
  }

  TaskFunction gemm1_function() const {
    switch (layer_->activation) {
      case INT8MOE_SILU: return gemm1_task<INT8MOE_SILU>;
      case INT8MOE_GELU: return gemm1_task<INT8MOE_GELU>;
      case INT8MOE_GELU_TANH: return gemm1_task<INT8MOE_GELU_TANH>;
      case INT8MOE_SWIGLUOAI: return gemm1_task<INT8MOE_SWIGLUOAI>;
      case INT8MOE_SILU_NO_MUL: return gemm1_task<INT8MOE_SILU_NO_MUL>;
      case INT8MOE_GELU_NO_MUL: return gemm1_task<INT8MOE_GELU_NO_MUL>;
      case INT8MOE_GELU_TANH_NO_MUL: return gemm1_task<INT8MOE_GELU_TANH_NO_MUL>;
      default: return gemm1_task<INT8MOE_RELU2_NO_MUL>;
    }
  }

  template <int kActivation>
  static INT8MOE_NOINLINE void gemm1_task(void* context, int64_t task, int64_t next, int) {
    static_cast<Driver*>(context)->gemm1<kActivation>(task, next);
  }

  // One task of GEMM1: `group` panels of h, of one expert.
  struct Columns {
    ActiveExpert expert;
    int64_t panel0;
    int group;
  };
  Columns columns_of(int64_t task) const {
    const int64_t blocks = ceil_div(panels1_, group1_);
    const int64_t panel0 = task % blocks * group1_, left = panels1_ - panel0;
    return {active_[task / blocks], panel0, static_cast<int>(left < group1_ ? left : group1_)};
  }
  const uint8_t* w13_panel(const Columns& c, int half, int p) const {
    return layer_->w13 + c.expert.local * layer_->w13_stride + half * Layout::half_bytes(inner_, hidden_) +
           (c.panel0 + p) * Layout::panel_bytes(hidden_);
  }

  template <int kActivation>
  void gemm1(int64_t task, int64_t next_task) {
    constexpr bool kGated = is_gated(kActivation);
    const Columns columns = columns_of(task);
    const Columns next = columns_of(next_task);
    const ActiveExpert expert = columns.expert;
    const int64_t panel0 = columns.panel0;
    const int group = columns.group;

    // Gate panels first, then the up panels of the same columns: scale and bias stand in the same order.
    alignas(64) float scale[kBlock], bias[kBlock];
    GemmBlock<kPanels> block;
    for (int half = 0; half < (kGated ? 2 : 1); ++half) {
      const int64_t channel0 = (expert.local * (kGated ? 2 : 1) + half) * inner_;
      Finish::gather_channels(layer_->w13_scale + channel0, inner_, panel0, group, scale + half * group * kColumns);
      const float* const own_bias = layer_->w13_bias == nullptr ? nullptr : layer_->w13_bias + channel0;
      Finish::gather_channels(own_bias, inner_, panel0, group, bias + half * group * kColumns);
      for (int p = 0; p < group; ++p) block.panel[half * group + p] = w13_panel(columns, half, p);
    }
    block.next_offset = distance(block.panel[0], w13_panel(next, 0, 0));
    block.panels = group * (kGated ? 2 : 1);
    block.depth = depth1_;
    block.row_stride = stride1_;
    block.rows = expert.rows;
    if (Kernel::kSortedRows || rows_call_ != nullptr) {
      set_sorted_rows(block, expert, q1_, stride1_);
    } else {
      block.rows_before = 0;
      block.rows_base = q1_;
      block.row_index = row_token_ + expert.first;
    }

    const int64_t padding = panel0 + group == panels1_ ? depth2_ - panels1_ * kColumns : 0;
    const bool has_bias = layer_->w13_bias != nullptr;
    Kernel::gemm(block, [&](int64_t row0, int rows, const int32_t* acc) __attribute__((always_inline)) {
      for (int r = 0; r < rows; ++r) {
        const int64_t row = expert.first + row0 + r;
        const RowScale s = scale1_[rows_call_ == nullptr ? row_token_[row] : row];
        float* h = h_ + row * depth2_ + panel0 * kColumns;
        if (has_bias)
          Finish::template activate_row<kActivation, true>(layer_, acc + r * kColumns, group, s, scale, bias, h);
        else
          Finish::template activate_row<kActivation, false>(layer_, acc + r * kColumns, group, s, scale, bias, h);
        for (int64_t i = 0; i < padding; ++i) h[group * kColumns + i] = 0.0f;
      }
    });
  }

  static INT8MOE_NOINLINE void gemm2_task(void* context, int64_t task, int64_t, int worker) {
    Driver& d = *static_cast<Driver*>(context);
    float* sums = d.rows_call_ != nullptr ? nullptr : d.sums_ + worker * d.tokens_ * kBlock;
    if (d.layer_->w2_bias != nullptr)
      d.gemm2<true>(task * d.group2_, sums);
    else
      d.gemm2<false>(task * d.group2_, sums);
  }

  template <bool kBias>
  void gemm2(int64_t panel0, float* sums) {
    const int panels = static_cast<int>(panels2_ - panel0 < group2_ ? panels2_ - panel0 : group2_);
    const int width = panels * kColumns;
    const int64_t left = hidden_ - panel0 * kColumns;
    const int64_t columns = left < width ? left : width;
    if (sums != nullptr) __builtin_memset(sums, 0, static_cast<size_t>(tokens_ * kBlock) * sizeof(float));

    alignas(64) float scale[kBlock], bias[kBlock];
    GemmBlock<kPanels> block;
    block.panels = panels;
    block.depth = depth2_;
    block.row_stride = stride2_;
    for (int64_t a = 0; a < entries_; ++a) {
      const ActiveExpert expert = active_[a];
      const int64_t channel0 = expert.local * hidden_;
      Finish::gather_channels(layer_->w2_scale + channel0, hidden_, panel0, panels, scale);
      Finish::gather_channels(kBias ? layer_->w2_bias + channel0 : nullptr, hidden_, panel0, panels, bias);
      const ActiveExpert& next = active_[a + 1 < entries_ ? a + 1 : a];
      for (int p = 0; p < panels; ++p)
        block.panel[p] =
            layer_->w2 + expert.local * layer_->w2_stride + (panel0 + p) * Layout::panel_bytes(inner_);
      block.next_offset = (next.local - expert.local) * layer_->w2_stride;
      set_sorted_rows(block, expert, q2_, stride2_);
      block.rows = expert.rows;
      Kernel::gemm(block, [&](int64_t row0, int rows, const int32_t* acc) __attribute__((always_inline)) {
        for (int r = 0; r < rows; ++r) {
          const int64_t row = expert.first + row0 + r;
          const RowScale s = scale2_[row];
          if (sums != nullptr) {
            float* total = sums + static_cast<int64_t>(row_token_[row]) * kBlock;
            Finish::template combine_row<kBias>(acc + r * kColumns, panels, s, scale, bias, row_weight_[row], total);
          } else {
            alignas(64) float y[kBlock];
            Finish::template write_row<kBias>(acc + r * kColumns, panels, s, scale, bias, y);
            __builtin_memcpy(out_ + ((token0_ + row) * hidden_ + panel0 * kColumns) * 4, y,
                             static_cast<size_t>(columns) * sizeof(float));
          }
        }
      });
    }
    if (sums != nullptr) {
      if (x_dtype_ == INT8MOE_BF16) return round_block<INT8MOE_BF16>(sums, panel0, columns);
      if (x_dtype_ == INT8MOE_F16) return round_block<INT8MOE_F16>(sums, panel0, columns);
      round_block<INT8MOE_F32>(sums, panel0, columns);
    }
  }

  template <int kDtype>
  void round_block(const float* sums, int64_t panel0, int64_t columns) const {
    for (int64_t token = 0; token < tokens_; ++token)
      Finish::template round_row<kDtype>(
          sums + token * kBlock, columns,
          out_ + ((token0_ + token) * hidden_ + panel0 * kColumns) * dtype_bytes(kDtype));
  }

  const int8moe_runtime* const runtime_;
  const int8moe_layer* const layer_;
  const int workers_;
  const bool gated_;
  const int64_t hidden_, inner_;
  const int64_t depth1_, depth2_;    // padded reductions
  const int64_t panels1_, panels2_;  // of one half of w13, of w2
  const int64_t stride1_, stride2_;  // bytes of a prepared row

  // The call.
  const int8moe_rows_call* rows_call_ = nullptr;  // null: the combining forward
  const void* x_ = nullptr;
  int64_t x_row_stride_ = 0, x_column_stride_ = 0, top_k_ = 0;
  int x_dtype_ = 0;
  char* out_ = nullptr;
  Slots slots_ = {};
  RouterWeights weights_ = {};

  // The chunk.
  int64_t token0_ = 0, tokens_ = 0, rows_ = 0, entries_ = 0, rows_per_task_ = 1;
  int gemm_workers_ = 1, group1_ = 1, group2_ = 1;
  ActiveExpert* active_ = nullptr;
  int64_t* cursor_ = nullptr;
  int32_t* row_token_ = nullptr;
  int32_t* slot_row_ = nullptr;
  float* row_weight_ = nullptr;
  RowScale *scale1_ = nullptr, *scale2_ = nullptr;
  uint8_t *q1_ = nullptr, *q2_ = nullptr;
  float *wide_ = nullptr, *sums_ = nullptr, *h_ = nullptr;
};

}  // namespace
}  // namespace int8moe

// Defines the one external symbol of a tier's translation unit: int8moe_tier_<name>.
#define INT8MOE_DEFINE_TIER(name, Kernel)                                                                       \
  extern "C" {                                                                                                  \
  extern const int8moe_tier int8moe_tier_##name;                                                                \
  const int8moe_tier int8moe_tier_##name = {#name, &int8moe::Driver<Kernel>::forward,                           \
                                            &int8moe::Driver<Kernel>::forward_rows,                             \
                                            &int8moe::Limits<Kernel>::run_peak,                                 \
                                            &int8moe::Limits<Kernel>::read_memory};                             \
  }

#endif
