"""exp, tanh, erf and the activations in fp32: ``int8moe.elementary`` line for line, in Triton.

Separate multiplies and adds, one rounding each. That takes ``enable_fp_fusion=False`` at each launch (otherwise the
compiler fuses them) and ``tl.div_rn`` (``/`` is an approximation on a GPU). ``tl.exp`` is one too, and is not used.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950216293335)
LN2_HIGH = tl.constexpr(0.693359375)
LN2_LOW = tl.constexpr(-2.12194440e-4)
EXP_0 = tl.constexpr(1.9875691500e-4)
EXP_1 = tl.constexpr(1.3981999507e-3)
EXP_2 = tl.constexpr(8.3334519073e-3)
EXP_3 = tl.constexpr(4.1665795894e-2)
EXP_4 = tl.constexpr(1.6666665459e-1)
EXP_5 = tl.constexpr(5.0000001201e-1)
EXP_MIN = tl.constexpr(-104.0)
EXP_MAX = tl.constexpr(89.0)

ERF_P = tl.constexpr(0.3275911)
ERF_0 = tl.constexpr(1.061405429)
ERF_1 = tl.constexpr(-1.453152027)
ERF_2 = tl.constexpr(1.421413741)
ERF_3 = tl.constexpr(-0.284496736)
ERF_4 = tl.constexpr(0.254829592)

SQRT_HALF = tl.constexpr(0.7071067811865476)
GELU_TANH_SCALE = tl.constexpr(0.7978845608028654)
GELU_TANH_CUBIC = tl.constexpr(0.044715)

# x + ROUNDER - ROUNDER is x rounded half to even, for |x| below 2**22: the sum has no bits left below one.
ROUNDER = tl.constexpr(12582912.0)


@triton.jit
def bits_of(x):
    """fp32 as int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    """int32 as fp32."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def magnitude(x):
    """|x|, NaN included."""
    return float_of(bits_of(x) & 0x7FFFFFFF)


@triton.jit
def copy_sign(size, x):
    """|size| with the sign of x."""
    return float_of((bits_of(size) & 0x7FFFFFFF) | (bits_of(x) & -0x80000000))


@triton.jit
def round_half_even(x):
    """The nearest integer, as fp32; |x| has to be below 2**22. NaN stays."""
    return (x + ROUNDER) - ROUNDER


@triton.jit
def power_of_two(n):
    """2**n for int32 n in [-126, 127]."""
    return float_of((n + 127) << 23)


@triton.jit
def exp(x):
    """e**x; 0 below -104, Inf above 89, NaN stays."""
    x = tl.where(x < EXP_MIN, EXP_MIN, x)
    x = tl.where(x > EXP_MAX, EXP_MAX, x)
    n = round_half_even(x * LOG2_E)
    r = x - n * LN2_HIGH
    r = r - n * LN2_LOW
    p = r * EXP_0 + EXP_1
    p = p * r + EXP_2
    p = p * r + EXP_3
    p = p * r + EXP_4
    p = p * r + EXP_5
    p = p * (r * r)
    p = p + r
    p = p + 1.0
    # NaN has no integer: any power of two will do, the product stays NaN.
    whole = tl.where(n == n, n, 0.0).to(tl.int32)
    half = whole >> 1
    return (p * power_of_two(half)) * power_of_two(whole - half)


@triton.jit
def tanh(x):
    """copysign((1 - t) / (1 + t), x) with t = exp(-2 |x|)."""
    t = exp(magnitude(x) * -2.0)
    return copy_sign(tl.div_rn(1.0 - t, 1.0 + t), x)


@triton.jit
def erf(x):
    """Formula 7.1.26 of Abramowitz and Stegun."""
    z = magnitude(x)
    t = tl.div_rn(tl.full(z.shape, 1.0, tl.float32), z * ERF_P + 1.0)
    p = t * ERF_0 + ERF_1
    p = p * t + ERF_2
    p = p * t + ERF_3
    p = p * t + ERF_4
    p = p * t
    return copy_sign(1.0 - p * exp((z * z) * -1.0), x)


@triton.jit
def silu(x):
    """X / (1 + exp(-x))."""
    return tl.div_rn(x, 1.0 + exp(x * -1.0))


@triton.jit
def gelu(x):
    """(0.5 x) (1 + erf(x sqrt(1/2)))."""
    return (x * 0.5) * (1.0 + erf(x * SQRT_HALF))


@triton.jit
def gelu_tanh(x):
    """(0.5 x) (1 + tanh(sqrt(2/pi) (x + 0.044715 ((x x) x))))."""
    cubic = (x * x) * x
    return (x * 0.5) * (1.0 + tanh((x + cubic * GELU_TANH_CUBIC) * GELU_TANH_SCALE))


@triton.jit
def activate(gate, up, alpha, limit, ACTIVATION: tl.constexpr):
    """Step 5; ``up`` is not read by the activations without a gate, alpha and limit by swigluoai alone."""
    if ACTIVATION == "silu":
        return silu(gate) * up
    elif ACTIVATION == "gelu":
        return gelu(gate) * up
    elif ACTIVATION == "gelu_tanh":
        return gelu_tanh(gate) * up
    elif ACTIVATION == "swigluoai":
        clipped = tl.where(gate > limit, limit, gate)
        u = tl.where(up > limit, limit, up)
        u = tl.where(u < -limit, -limit, u)
        return (u + 1.0) * tl.div_rn(clipped, 1.0 + exp((clipped * alpha) * -1.0))
    elif ACTIVATION == "silu_no_mul":
        return silu(gate)
    elif ACTIVATION == "gelu_no_mul":
        return gelu(gate)
    elif ACTIVATION == "gelu_tanh_no_mul":
        return gelu_tanh(gate)
    else:
        tl.static_assert(ACTIVATION == "relu2_no_mul", "an activation of int8moe.contracts.ACTIVATIONS")
        positive = tl.where(gate < 0.0, 0.0, gate)
        return positive * positive
