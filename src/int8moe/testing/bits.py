"""Comparison by bits: the only equality that int8moe knows for results."""

from __future__ import annotations

import torch
from torch import Tensor

from ..contracts import Numerics

__all__ = ["assert_matches", "assert_same_bits", "comparisons", "same_bits"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_made = 0


def comparisons() -> int:
    """Comparisons of two tensors that :func:`assert_same_bits` and :func:`assert_matches` made so far."""
    return _made


def _integers(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().contiguous()
    return tensor.view(_INTEGERS[tensor.element_size()]) if tensor.is_floating_point() else tensor


def _different(actual: Tensor, expected: Tensor) -> Tensor:
    different = _integers(actual) != _integers(expected)
    if actual.is_floating_point():
        # isnan compares x with itself, which no flush-to-zero mode changes.
        different &= ~(torch.isnan(actual) & torch.isnan(expected))
    return different


def _kind(actual: Tensor, expected: Tensor) -> str | None:
    if actual.dtype != expected.dtype:
        return f"dtype differs: got {actual.dtype}, expected {expected.dtype}"
    if actual.shape != expected.shape:
        return f"shape differs: got {list(actual.shape)}, expected {list(expected.shape)}"
    return None


def same_bits(actual: Tensor, expected: Tensor) -> bool:
    """Whether two tensors are equal in dtype, shape and bits; any NaN equals any NaN, -0 is not +0."""
    return _kind(actual, expected) is None and not bool(_different(actual, expected).any())


def _pattern(tensor: Tensor, index: tuple[int, ...]) -> str:
    element = tensor.detach()[index].reshape(1)
    width = 8 * element.element_size()
    bits = int(_integers(element).item()) & ((1 << width) - 1)
    return f"{element.item()!r} (0x{bits:0{width // 4}x})"


def assert_same_bits(actual: Tensor, expected: Tensor, context: str = "") -> None:
    """Raise AssertionError unless ``same_bits(actual, expected)``; the text names the first difference.

    Args:
        actual: what a kernel returned.
        expected: what the reference says.
        context: put in front of the text, to tell one comparison of many.
    """
    global _made
    _made += 1
    prefix = f"{context}: " if context else ""
    kind = _kind(actual, expected)
    if kind is not None:
        raise AssertionError(prefix + kind)
    different = _different(actual, expected)
    if not bool(different.any()):
        return
    where = different.nonzero()
    index = tuple(where[0].tolist())
    raise AssertionError(
        f"{prefix}bits differ in {len(where)} of {actual.numel()} elements, first at {list(index)}: "
        f"got {_pattern(actual, index)}, expected {_pattern(expected, index)}"
    )


def assert_matches(numerics: Numerics, actual: Tensor, expected: Tensor, context: str = "") -> None:
    """Compare as the kernel declares: by bits, or within its tolerance.

    A tolerance holds row by row: relative L2 error at most rtol (or the output dtype's own rounding step,
    where that is more), or every element within atol. NaN and Inf must stand where the reference has
    them. Tensors that are not floating point are compared by bits.
    """
    if numerics.kind == "bitwise" or not actual.is_floating_point():
        assert_same_bits(actual, expected, context)
        return
    global _made
    _made += 1
    prefix = f"{context}: " if context else ""
    kind = _kind(actual, expected)
    if kind is not None:
        raise AssertionError(prefix + kind)
    if actual.numel() == 0:
        return
    got, want = (t.detach().to(torch.float64).reshape(-1, t.shape[-1]) for t in (actual, expected))
    special = ~torch.isfinite(want)
    misplaced = torch.where(special, _different(got, want), ~torch.isfinite(got))
    if bool(misplaced.any()):
        index = misplaced.nonzero()[0].tolist()
        raise AssertionError(
            f"{prefix}NaN or Inf differs, first at {index}: got {got[tuple(index)].item()!r}, "
            f"expected {want[tuple(index)].item()!r}"
        )
    error = torch.where(special, torch.zeros_like(want), got - want)
    want = torch.where(special, torch.zeros_like(want), want)
    rtol = max(numerics.rtol, torch.finfo(expected.dtype).eps)
    relative = error.norm(dim=1) <= rtol * want.norm(dim=1)
    absolute = error.abs().amax(dim=1) <= numerics.atol
    bad = ~(relative | absolute)
    if bool(bad.any()):
        row = int(bad.nonzero()[0].item())
        norm = float(want[row].norm())
        raise AssertionError(
            f"{prefix}{int(bad.sum())} of {len(bad)} rows outside the declared {numerics}; row {row}: "
            f"relative error {float(error[row].norm()) / norm if norm else float('inf'):.3g}, "
            f"largest difference {float(error[row].abs().max()):.3g}"
        )
