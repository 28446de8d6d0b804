// The float functions of docs/numerics.md, a translation of int8moe/reference.py line for line.
//
// Compiled with -ffp-contract=off and without fast-math: every multiply, add and divide below is one IEEE
// operation with one rounding. Values at the edges: exp(+inf) = inf, exp(-inf) = 0, inf from about 88.723 on,
// denormal results rounded once; tanh(+-inf) = erf(+-inf) = +-1; NaN stays NaN everywhere.
#ifndef INT8MOE_NUMERICS_H
#define INT8MOE_NUMERICS_H

#include "abi.h"
#include "vectors.h"

#if defined(__FAST_MATH__)
#error "int8moe is bit exact: build it without -ffast-math"
#endif

namespace int8moe {
namespace {

// Decimal constants go through double, as Python's floats do.
constexpr float kLog2E = static_cast<float>(1.44269504088896341);
constexpr float kLn2High = static_cast<float>(0.693359375);
constexpr float kLn2Low = static_cast<float>(-2.12194440e-4);
constexpr float kExp0 = static_cast<float>(1.9875691500e-4);
constexpr float kExp1 = static_cast<float>(1.3981999507e-3);
constexpr float kExp2 = static_cast<float>(8.3334519073e-3);
constexpr float kExp3 = static_cast<float>(4.1665795894e-2);
constexpr float kExp4 = static_cast<float>(1.6666665459e-1);
constexpr float kExp5 = static_cast<float>(5.0000001201e-1);
constexpr float kExpMin = -104.0f;
constexpr float kExpMax = 89.0f;
constexpr float kErfP = static_cast<float>(0.3275911);
constexpr float kErf0 = static_cast<float>(1.061405429);
constexpr float kErf1 = static_cast<float>(-1.453152027);
constexpr float kErf2 = static_cast<float>(1.421413741);
constexpr float kErf3 = static_cast<float>(-0.284496736);
constexpr float kErf4 = static_cast<float>(0.254829592);
constexpr float kSqrtHalf = static_cast<float>(0.70710678118654757);      // math.sqrt(0.5)
constexpr float kGeluTanhScale = static_cast<float>(0.79788456080286541);  // math.sqrt(2.0 / math.pi)
constexpr float kGeluTanhCubic = static_cast<float>(0.044715);

// 1.5 * 2^23: adding it rounds |v| < 2^22 to an integer, half to even, and leaves that integer in the low bits.
constexpr float kRound = 12582912.0f;
constexpr uint32_t kRoundBits = 0x4B400000u;

// 2^n from its bits, n in [-126, 127].
INT8MOE_INLINE F32 power_of_two(I32 n) { return float_of(((U32)n + 127u) << 23); }

INT8MOE_INLINE F32 exp(F32 x) {
  x = at_most(at_least(x, splat(kExpMin)), splat(kExpMax));
  const F32 shifted = x * kLog2E + kRound;
  const F32 n = shifted - kRound;  // round(x * log2 e); a zero may have the other sign, which no step below sees
  F32 r = x - n * kLn2High;
  r = r - n * kLn2Low;
  F32 p = splat(kExp0);
  p = p * r + kExp1;
  p = p * r + kExp2;
  p = p * r + kExp3;
  p = p * r + kExp4;
  p = p * r + kExp5;
  p = p * (r * r);
  p = p + r;
  p = p + 1.0f;
  // NaN leaves some integer here; whatever power of two it makes, the product stays NaN.
  const I32 whole = (I32)(bits_of(shifted) - kRoundBits);
  const I32 half = whole >> 1;
  return (p * power_of_two(half)) * power_of_two((I32)((U32)whole - (U32)half));
}

INT8MOE_INLINE F32 tanh(F32 x) {
  const F32 t = exp(-2.0f * magnitude(x));
  return with_sign((1.0f - t) / (1.0f + t), x);
}

INT8MOE_INLINE F32 erf(F32 x) {
  const F32 z = magnitude(x);
  const F32 t = 1.0f / (kErfP * z + 1.0f);
  F32 p = splat(kErf0);
  p = p * t + kErf1;
  p = p * t + kErf2;
  p = p * t + kErf3;
  p = p * t + kErf4;
  p = p * t;
  return with_sign(1.0f - p * exp(-(z * z)), x);
}

INT8MOE_INLINE F32 silu(F32 x) { return x / (1.0f + exp(-x)); }

INT8MOE_INLINE F32 gelu(F32 x) { return (0.5f * x) * (1.0f + erf(x * kSqrtHalf)); }

INT8MOE_INLINE F32 gelu_tanh(F32 x) {
  const F32 cubic = (x * x) * x;
  const F32 inner = (x + cubic * kGeluTanhCubic) * kGeluTanhScale;
  return (0.5f * x) * (1.0f + tanh(inner));
}

INT8MOE_INLINE F32 swigluoai(F32 gate, F32 up, float alpha, float limit) {
  gate = at_most(gate, splat(limit));
  up = at_most(at_least(up, splat(-limit)), splat(limit));
  return (up + 1.0f) * (gate / (1.0f + exp(-(gate * alpha))));
}

INT8MOE_INLINE F32 relu2(F32 x) {
  const F32 positive = at_least(x, F32{});
  return positive * positive;
}

constexpr bool is_gated(int activation) { return activation < INT8MOE_SILU_NO_MUL; }

template <int kActivation>
INT8MOE_INLINE F32 activate(F32 gate, F32 up, float alpha, float limit) {
  switch (kActivation) {
    case INT8MOE_SILU: return silu(gate) * up;
    case INT8MOE_GELU: return gelu(gate) * up;
    case INT8MOE_GELU_TANH: return gelu_tanh(gate) * up;
    case INT8MOE_SWIGLUOAI: return swigluoai(gate, up, alpha, limit);
    case INT8MOE_SILU_NO_MUL: return silu(gate);
    case INT8MOE_GELU_NO_MUL: return gelu(gate);
    case INT8MOE_GELU_TANH_NO_MUL: return gelu_tanh(gate);
    default: return relu2(gate);
  }
}

// Steps 4 and 7: (fp32(acc) * row scale) * channel scale, then + bias where there is one.
template <bool kBias>
INT8MOE_INLINE F32 dequantize(I32 acc, float row_scale, F32 channel_scale, F32 bias) {
  const F32 d = (to_float(acc) * row_scale) * channel_scale;
  return kBias ? d + bias : d;
}

}  // namespace
}  // namespace int8moe
#endif
