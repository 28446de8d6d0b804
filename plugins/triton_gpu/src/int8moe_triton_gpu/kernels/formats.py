"""bf16, fp16 and fp32 as bits: exact widening, and the one rounding of step 9.

bf16 tensors are handed in as int16: hardware conversions and Triton's interpreter differ on denormals and on rounding,
integer operations do not.
"""

import triton
import triton.language as tl

from .elementary import bits_of, float_of


@triton.jit
def widen(values, FORMAT: tl.constexpr):
    """Loaded values of a tensor of FORMAT "bfloat16" (as int16), "float16" or "float32", as fp32."""
    if FORMAT == "bfloat16":
        return float_of(values.to(tl.int32) << 16)
    else:
        return values.to(tl.float32)


@triton.jit
def narrow(x, FORMAT: tl.constexpr):
    """fp32 rounded half to even to what a tensor of FORMAT stores."""
    if FORMAT == "bfloat16":
        bits = bits_of(x)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x == x, rounded, 0x7FC0).to(tl.int16)
    elif FORMAT == "float16":
        return x.to(tl.float16)
    else:
        return x
