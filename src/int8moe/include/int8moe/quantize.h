// Q of docs/numerics.md: one fp32 row -> int8 in the tier's prepared form, its scale, and its compensation.
#ifndef INT8MOE_QUANTIZE_H
#define INT8MOE_QUANTIZE_H

#include "float_formats.h"
#include "microkernel.h"
#include "numerics.h"
#include "panels.h"
#include "vectors.h"

namespace int8moe {
namespace {

// fp32 values of one row, padded with +0 to `padded`; times `factor` where kScaled (router weight on the input).
template <int kDtype, bool kScaled>
inline void widen_row(const void* row, int64_t n, int64_t padded, float factor, float* out) {
  const char* source = static_cast<const char*>(row);
  constexpr int64_t bytes = dtype_bytes(kDtype);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const F32 x = load_as_f32<kDtype>(source + i * bytes);
    store(out + i, kScaled ? x * factor : x);
  }
  if (i < n) {
    alignas(64) char tail[kLanes * 4] = {};
    __builtin_memcpy(tail, source + i * bytes, static_cast<size_t>((n - i) * bytes));
    const F32 x = load_as_f32<kDtype>(tail);
    alignas(64) float lanes[kLanes];
    store(lanes, kScaled ? x * factor : x);
    for (int lane = 0; i < n; ++i, ++lane) out[i] = lanes[lane];
  }
  for (; i < padded; ++i) out[i] = 0.0f;
}

template <bool kScaled>
inline void widen_row_of(int dtype, const void* row, int64_t n, int64_t padded, float factor, float* out) {
  if (dtype == INT8MOE_BF16) return widen_row<INT8MOE_BF16, kScaled>(row, n, padded, factor, out);
  if (dtype == INT8MOE_F16) return widen_row<INT8MOE_F16, kScaled>(row, n, padded, factor, out);
  widen_row<INT8MOE_F32, kScaled>(row, n, padded, factor, out);
}

// Any column stride: gathered first, in the row's own dtype. `out` has room for `padded` floats.
inline void widen_strided_row(int dtype, const void* row, int64_t stride, int64_t n, int64_t padded, float* out) {
  const int64_t bytes = dtype_bytes(dtype);
  const char* source = static_cast<const char*>(row);
  if (bytes == 4) {
    for (int64_t i = 0; i < n; ++i) __builtin_memcpy(out + i, source + i * stride * 4, 4);
    for (int64_t i = n; i < padded; ++i) out[i] = 0.0f;
    return;
  }
  for (int64_t i = 0; i < n; i += kLanes) {
    uint16_t lanes[kLanes] = {};
    for (int64_t j = 0; j < kLanes && i + j < n; ++j) __builtin_memcpy(lanes + j, source + (i + j) * stride * 2, 2);
    const U16 v = load<U16>(lanes);
    store(out + i, dtype == INT8MOE_BF16 ? widen_bf16(v) : widen_f16(v));
  }
  for (int64_t i = round_up(n, kLanes); i < padded; ++i) out[i] = 0.0f;
}

struct RowScale {
  float scale;
  int32_t compensation;  // Layout::kOffset * sum(q)
};

// `row` holds `depth` floats, a multiple of 64, padding zeroed (zeros change neither amax nor q nor sum).
template <class Kernel>
inline INT8MOE_NOINLINE RowScale quantize_row(const float* row, int64_t depth, uint8_t* prepared) {
  // Compared as integers, so that NaN > Inf > any finite value.
  I32 largest0 = {}, largest1 = {};
  for (int64_t i = 0; i < depth; i += 2 * kLanes) {
    largest0 = larger(largest0, (I32)bits_of(magnitude(load<F32>(row + i))));
    largest1 = larger(largest1, (I32)bits_of(magnitude(load<F32>(row + i + kLanes))));
  }
  const int32_t amax_bits = largest_lane(larger(largest0, largest1));
  float amax;
  __builtin_memcpy(&amax, &amax_bits, 4);
  const bool finite = amax_bits < 0x7F800000;
  const float inverse = 127.0f / amax;
  int32_t inverse_bits;
  __builtin_memcpy(&inverse_bits, &inverse, 4);
  const bool live = finite && amax_bits != 0 && (inverse_bits & 0x7FFFFFFF) < 0x7F800000;

  alignas(64) int8_t q[kDepthUnit];
  if (!live) {
    __builtin_memset(q, 0, sizeof q);
    for (int64_t k = 0; k < depth; k += kDepthUnit) Kernel::prepare(q, prepared, k);
    return {finite ? 0.0f : __builtin_nanf(""), 0};
  }
  I32 sum = {};
  for (int64_t k = 0; k < depth; k += kDepthUnit) {
    for (int i = 0; i < kDepthUnit; i += kLanes) {
      // |row * inverse| < 127.5: the clamp of the definition changes nothing after this rounding to integers.
      const F32 shifted = load<F32>(row + k + i) * inverse + kRound;
      const I32 n = (I32)(bits_of(shifted) - kRoundBits);
      sum += n;
      store(q + i, __builtin_convertvector(n, I8));
    }
    Kernel::prepare(q, prepared, k);
  }
  return {amax / 127.0f, Kernel::Layout::kOffset * sum_lanes(sum)};
}

// Rows that come as int8 with a scale of their own.
template <class Kernel>
inline int32_t prepare_int8_row(const int8_t* row, int64_t stride, int64_t n, int64_t depth, uint8_t* prepared) {
  alignas(64) int8_t q[kDepthUnit];
  int32_t sum = 0;
  for (int64_t k = 0; k < depth; k += kDepthUnit) {
    for (int64_t i = 0; i < kDepthUnit; ++i) {
      q[i] = k + i < n ? row[(k + i) * stride] : int8_t{0};
      sum += q[i];
    }
    Kernel::prepare(q, prepared, k);
  }
  return Kernel::Layout::kOffset * sum;
}

}  // namespace
}  // namespace int8moe
#endif
