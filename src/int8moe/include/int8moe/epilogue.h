// What happens to int32 sums: dequantise, activate, combine, round. Steps 4, 5, 7, 8 and 9 of docs/numerics.md, by
// portable vectors, so that every tier has the same float code. `acc` is [panel][kRows][kColumns], advanced to a row.
#ifndef INT8MOE_EPILOGUE_H
#define INT8MOE_EPILOGUE_H

#include "float_formats.h"
#include "numerics.h"
#include "quantize.h"

namespace int8moe {
namespace {

template <class Kernel>
struct Epilogue {
  static constexpr int kColumns = Kernel::Layout::kColumns;
  static constexpr int kRows = Kernel::kRows;

  // Channel values of `panels` panels from `panel0` on, one panel after another, zero beyond `channels`.
  static void gather_channels(const float* source, int64_t channels, int64_t panel0, int panels, float* out) {
    const int64_t left = channels - panel0 * kColumns, all = int64_t{panels} * kColumns;
    const int64_t count = source == nullptr ? 0 : left < all ? left : all;
    if (count > 0) __builtin_memcpy(out, source + panel0 * kColumns, static_cast<size_t>(count) * sizeof(float));
    for (int64_t i = count; i < all; ++i) out[i] = 0.0f;
  }

  // `group` gate panels, then the up panels of the same columns.
  template <int kActivation, bool kBias>
  static INT8MOE_INLINE void activate_row(const int8moe_layer* layer, const int32_t* acc, int group, RowScale s,
                                          const float* scale, const float* bias, float* h) {
    constexpr int kTile = kRows * kColumns;
    const I32 compensation = splat_i32(s.compensation);
    for (int p = 0; p < group; ++p)
      for (int c = 0; c < kColumns; c += kLanes) {
        const int gate_at = p * kColumns + c, up_at = gate_at + group * kColumns;
        const F32 gate = dequantize<kBias>(load<I32>(acc + p * kTile + c) - compensation, s.scale,
                                           load<F32>(scale + gate_at), load<F32>(bias + gate_at));
        F32 up = {};
        if (is_gated(kActivation))
          up = dequantize<kBias>(load<I32>(acc + (group + p) * kTile + c) - compensation, s.scale,
                                 load<F32>(scale + up_at), load<F32>(bias + up_at));
        store(h + gate_at, activate<kActivation>(gate, up, layer->swiglu_alpha, layer->swiglu_limit));
      }
  }

  template <bool kBias>
  static INT8MOE_INLINE F32 dequantized(const int32_t* acc, int p, int c, RowScale s, const float* scale,
                                        const float* bias) {
    return dequantize<kBias>(load<I32>(acc + p * kRows * kColumns + c) - splat_i32(s.compensation), s.scale,
                             load<F32>(scale + p * kColumns + c), load<F32>(bias + p * kColumns + c));
  }

  // Step 8: out = out + topk_weight * y, two roundings.
  template <bool kBias>
  static INT8MOE_INLINE void combine_row(const int32_t* acc, int panels, RowScale s, const float* scale,
                                         const float* bias, float weight, float* total) {
    for (int p = 0; p < panels; ++p)
      for (int c = 0; c < kColumns; c += kLanes) {
        const F32 y = dequantized<kBias>(acc, p, c, s, scale, bias);
        float* here = total + p * kColumns + c;
        store(here, load<F32>(here) + weight * y);
      }
  }

  template <bool kBias>
  static INT8MOE_INLINE void write_row(const int32_t* acc, int panels, RowScale s, const float* scale,
                                       const float* bias, float* y) {
    for (int p = 0; p < panels; ++p)
      for (int c = 0; c < kColumns; c += kLanes)
        store(y + p * kColumns + c, dequantized<kBias>(acc, p, c, s, scale, bias));
  }

  // Step 9: one rounding of a row's first `columns` sums to the output dtype.
  template <int kDtype>
  static INT8MOE_INLINE void round_row(const float* total, int64_t columns, char* out) {
    constexpr int64_t bytes = dtype_bytes(kDtype);
    int64_t c = 0;
    for (; c + kLanes <= columns; c += kLanes) store_from_f32<kDtype>(out + c * bytes, load<F32>(total + c));
    if (c < columns) {
      alignas(64) char tail[kLanes * 4];
      store_from_f32<kDtype>(tail, load<F32>(total + c));
      __builtin_memcpy(out + c * bytes, tail, static_cast<size_t>((columns - c) * bytes));
    }
  }
};

}  // namespace
}  // namespace int8moe
#endif
