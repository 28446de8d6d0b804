// bf16 and fp16 to fp32 and back, with integer operations: no conversion instruction, so no flushed denormal.
#ifndef INT8MOE_FLOAT_FORMATS_H
#define INT8MOE_FLOAT_FORMATS_H

#include "abi.h"
#include "vectors.h"

namespace int8moe {
namespace {

INT8MOE_INLINE F32 widen_bf16(U16 v) { return float_of(__builtin_convertvector(v, U32) << 16); }

INT8MOE_INLINE F32 widen_f16(U16 v) {
  const U32 h = __builtin_convertvector(v, U32);
  const U32 sign = (h & 0x8000u) << 16;
  const U32 size = h & 0x7FFFu;
  const U32 rebias = splat_u32(112u << 23);
  const U32 normal = (size << 13) + rebias;
  const U32 special = normal + rebias;                                      // Inf and NaN: exponent 31 -> 255
  const U32 denormal = bits_of(to_float((I32)size) * 5.9604644775390625e-8f);  // size * 2^-24, exact
  const U32 wide = size >= splat_u32(0x7C00u) ? special : normal;
  return float_of(sign | (size < splat_u32(0x0400u) ? denormal : wide));
}

INT8MOE_INLINE U16 narrow_bf16(F32 v) {
  const U32 bits = bits_of(v);
  const U32 rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const U32 nan = splat_u32(0x7FC0u);
  return __builtin_convertvector((bits & 0x7FFFFFFFu) > splat_u32(0x7F800000u) ? nan : rounded, U16);
}

INT8MOE_INLINE U16 narrow_f16(F32 v) {
  const U32 bits = bits_of(v);
  const U32 sign = (bits >> 16) & 0x8000u;
  const U32 size = bits & 0x7FFFFFFFu;
  const U32 normal = (size + 0xFFFu + ((size >> 13) & 1u) - (112u << 23)) >> 13;
  // Below 2^-14 the step is 2^-24, the step of fp32 in [0.5, 1): adding 0.5 rounds, half to even.
  const U32 denormal = bits_of(float_of(size) + 0.5f) - 0x3F000000u;
  U32 h = size < splat_u32(0x38800000u) ? denormal : normal;
  h = size >= splat_u32(0x477FF000u) ? splat_u32(0x7C00u) : h;  // 65520 and above round to Inf
  h = size > splat_u32(0x7F800000u) ? splat_u32(0x7E00u) : h;
  return __builtin_convertvector(h | sign, U16);
}

template <int kDtype>
INT8MOE_INLINE F32 load_as_f32(const void* p) {
  if (kDtype == INT8MOE_BF16) return widen_bf16(load<U16>(p));
  if (kDtype == INT8MOE_F16) return widen_f16(load<U16>(p));
  return load<F32>(p);
}

template <int kDtype>
INT8MOE_INLINE void store_from_f32(void* p, F32 v) {
  if (kDtype == INT8MOE_BF16) return store(p, narrow_bf16(v));
  if (kDtype == INT8MOE_F16) return store(p, narrow_f16(v));
  store(p, v);
}

constexpr int64_t dtype_bytes(int dtype) {
  return dtype == INT8MOE_I8 ? 1 : dtype == INT8MOE_BF16 || dtype == INT8MOE_F16 ? 2 : dtype == INT8MOE_I64 ? 8 : 4;
}

// One element, for strided rows and router weights.
inline float load_scalar(const void* base, int64_t index, int dtype) {
  const char* p = static_cast<const char*>(base) + index * dtype_bytes(dtype);
  if (dtype == INT8MOE_F32) {
    float f;
    __builtin_memcpy(&f, p, 4);
    return f;
  }
  uint16_t lanes[kLanes] = {};
  __builtin_memcpy(lanes, p, 2);
  return dtype == INT8MOE_BF16 ? widen_bf16(load<U16>(lanes))[0] : widen_f16(load<U16>(lanes))[0];
}

inline int64_t load_index(const void* base, int64_t index, int dtype) {
  if (dtype == INT8MOE_I64) {
    int64_t v;
    __builtin_memcpy(&v, static_cast<const char*>(base) + index * 8, 8);
    return v;
  }
  int32_t v;
  __builtin_memcpy(&v, static_cast<const char*>(base) + index * 4, 4);
  return v;
}

}  // namespace
}  // namespace int8moe
#endif
