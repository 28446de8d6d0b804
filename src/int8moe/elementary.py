"""exp, tanh, erf and the activations in fp32: step 5 of docs/numerics.md, and the definition of its functions.

Separate multiplies and adds only, one rounding each; the native header numerics.h is the translation, line for
line. Give them blocks of rows below torch's grain (see int8moe.reference) where the control word matters.
"""

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor

__all__ = ["activate", "erf", "exp", "gelu", "gelu_tanh", "silu", "swigluoai", "tanh"]


def _f32(value: float) -> float:
    """The fp32 nearest to ``value``, so that no constant depends on how torch casts Python scalars."""
    rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return rounded


# exp: x = n * ln 2 + r, polynomial on |r| <= ln 2 / 2 (coefficients of the Cephes library, expf).
_LOG2_E = _f32(1.44269504088896341)
_LN2_HIGH = _f32(0.693359375)  # ten significant bits: n * _LN2_HIGH is exact
_LN2_LOW = _f32(-2.12194440e-4)
_EXP_POLYNOMIAL = tuple(
    map(
        _f32,
        (
            1.9875691500e-4,
            1.3981999507e-3,
            8.3334519073e-3,
            4.1665795894e-2,
            1.6666665459e-1,
            5.0000001201e-1,
        ),
    )
)
_EXP_MIN, _EXP_MAX = -104.0, 89.0  # exp is 0 below, inf above

# erf: Abramowitz and Stegun, Handbook of Mathematical Functions, formula 7.1.26.
_ERF_P = _f32(0.3275911)
_ERF_POLYNOMIAL = tuple(map(_f32, (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)))

_SQRT_HALF = _f32(math.sqrt(0.5))
_GELU_TANH_SCALE = _f32(math.sqrt(2.0 / math.pi))
_GELU_TANH_CUBIC = _f32(0.044715)


def _power_of_two(n: Tensor) -> Tensor:
    """2**n in fp32 for int32 n in [-126, 127], from its bits."""
    return ((n + 127) << 23).view(torch.float32)


def exp(x: Tensor) -> Tensor:
    """Return e**x in fp32.

    exp(+inf) = inf, exp(-inf) = 0, exp(NaN) = NaN; inf from about 88.723 on; denormal results are rounded
    once; relative error <= 4e-7 on [-87.3, 88.7].
    """
    x = torch.clamp(x, _EXP_MIN, _EXP_MAX)
    n = torch.round(x * _LOG2_E)
    r = x - n * _LN2_HIGH
    r = r - n * _LN2_LOW
    p = torch.full_like(r, _EXP_POLYNOMIAL[0])
    for coefficient in _EXP_POLYNOMIAL[1:]:
        p = p * r + coefficient
    p = p * (r * r)
    p = p + r
    p = p + 1.0
    # NaN has no integer: any power of two will do, the product stays NaN.
    whole = torch.where(torch.isnan(n), torch.zeros_like(n), n).to(torch.int32)
    half = whole >> 1
    return (p * _power_of_two(half)) * _power_of_two(whole - half)


def tanh(x: Tensor) -> Tensor:
    """Hyperbolic tangent in fp32: copysign((1 - t) / (1 + t), x) with t = exp(-2 |x|); tanh(+-inf) = +-1, NaN stays."""
    t = exp(-2.0 * torch.abs(x))
    return torch.copysign(torch.div(1.0 - t, 1.0 + t), x)


def erf(x: Tensor) -> Tensor:
    """Error function in fp32, absolute error <= 5e-7; erf(+-inf) = +-1, NaN stays."""
    z = torch.abs(x)
    one = torch.ones_like(z)
    t = torch.div(one, _ERF_P * z + 1.0)
    p = torch.full_like(t, _ERF_POLYNOMIAL[0])
    for coefficient in _ERF_POLYNOMIAL[1:]:
        p = p * t + coefficient
    p = p * t
    return torch.copysign(1.0 - p * exp(-(z * z)), x)


def silu(x: Tensor) -> Tensor:
    """X / (1 + exp(-x))."""
    return torch.div(x, 1.0 + exp(-x))


def gelu(x: Tensor) -> Tensor:
    """(0.5 x) (1 + erf(x sqrt(1/2)))."""
    return (0.5 * x) * (1.0 + erf(x * _SQRT_HALF))


def gelu_tanh(x: Tensor) -> Tensor:
    """(0.5 x) (1 + tanh(sqrt(2/pi) (x + 0.044715 ((x x) x))))."""
    cubic = (x * x) * x
    inner = (x + cubic * _GELU_TANH_CUBIC) * _GELU_TANH_SCALE
    return (0.5 * x) * (1.0 + tanh(inner))


def swigluoai(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    """(u' + 1) (g' / (1 + exp(-(alpha g')))), g' = min(g, limit), u' = clamp(u, -limit, limit)."""
    alpha, limit = _f32(alpha), _f32(limit)
    gate = torch.clamp(gate, max=limit)
    up = torch.clamp(up, -limit, limit)
    return (up + 1.0) * torch.div(gate, 1.0 + exp(-(gate * alpha)))


def activate(
    gate: Tensor,
    up: Tensor | None = None,
    *,
    activation: str,
    swiglu_alpha: float = 1.702,
    swiglu_limit: float = 7.0,
) -> Tensor:
    """Step 5 on fp32 tensors of one shape; ``up`` is None exactly for the activations without a gate."""
    if activation == "relu2_no_mul":
        positive = torch.clamp(gate, min=0.0)
        return positive * positive
    functions = {"silu": silu, "gelu": gelu, "gelu_tanh": gelu_tanh}
    if up is None:
        return functions[activation.removesuffix("_no_mul")](gate)
    if activation == "swigluoai":
        return swigluoai(gate, up, swiglu_alpha, swiglu_limit)
    return functions[activation](gate) * up
