// Portable vectors of INT8MOE_LANES floats (gcc and clang vector extensions), set by a tier before including.
//
// Everything in these headers lies in an unnamed namespace: each translation unit owns its copy with internal
// linkage, so the linker can never hand one tier's instructions to another.
#ifndef INT8MOE_VECTORS_H
#define INT8MOE_VECTORS_H

#include <stddef.h>
#include <stdint.h>

#ifndef INT8MOE_LANES
#error "define INT8MOE_LANES (4, 8 or 16 floats per vector) before including int8moe headers"
#endif

#if defined(__GNUC__) && !defined(__clang__)
// Vectors wider than a function's target are passed in memory; all of these functions are inlined.
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

#define INT8MOE_INLINE inline __attribute__((always_inline))
#define INT8MOE_NOINLINE __attribute__((noinline))

namespace int8moe {
namespace {

constexpr int kLanes = INT8MOE_LANES;

typedef float F32 __attribute__((vector_size(4 * INT8MOE_LANES)));
typedef int32_t I32 __attribute__((vector_size(4 * INT8MOE_LANES)));
typedef uint32_t U32 __attribute__((vector_size(4 * INT8MOE_LANES)));
typedef uint16_t U16 __attribute__((vector_size(2 * INT8MOE_LANES)));
typedef int8_t I8 __attribute__((vector_size(INT8MOE_LANES)));

template <class Vector>
INT8MOE_INLINE Vector load(const void* p) {
  Vector v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

template <class Vector>
INT8MOE_INLINE void store(void* p, Vector v) {
  __builtin_memcpy(p, &v, sizeof v);
}

INT8MOE_INLINE F32 splat(float x) { return x - F32{}; }  // exact, also for -0: x - 0 = x
INT8MOE_INLINE I32 splat_i32(int32_t x) { return x - I32{}; }
INT8MOE_INLINE U32 splat_u32(uint32_t x) { return x - U32{}; }

// Reinterpretation of bits: a cast between vector types of one size never converts values.
INT8MOE_INLINE U32 bits_of(F32 v) { return (U32)v; }
INT8MOE_INLINE F32 float_of(U32 v) { return (F32)v; }

INT8MOE_INLINE F32 to_float(I32 v) { return __builtin_convertvector(v, F32); }  // nearest, half to even

// Compare and select: a NaN in v stays, as torch.clamp has it.
INT8MOE_INLINE F32 at_least(F32 v, F32 low) { return v < low ? low : v; }
INT8MOE_INLINE F32 at_most(F32 v, F32 high) { return v > high ? high : v; }
INT8MOE_INLINE I32 larger(I32 a, I32 b) { return a > b ? a : b; }

INT8MOE_INLINE F32 magnitude(F32 v) { return float_of(bits_of(v) & 0x7FFFFFFFu); }
INT8MOE_INLINE F32 with_sign(F32 size, F32 sign) {
  return float_of((bits_of(size) & 0x7FFFFFFFu) | (bits_of(sign) & 0x80000000u));
}

INT8MOE_INLINE int32_t largest_lane(I32 v) {
  int32_t m = v[0];
  for (int i = 1; i < kLanes; ++i) m = v[i] > m ? v[i] : m;
  return m;
}

INT8MOE_INLINE int32_t sum_lanes(I32 v) {
  int32_t s = 0;
  for (int i = 0; i < kLanes; ++i) s += v[i];
  return s;
}

}  // namespace
}  // namespace int8moe
#endif
