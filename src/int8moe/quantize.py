"""From float experts to int8 weights with one fp32 scale a row: Q of docs/numerics.md."""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import UnsupportedInputError
from .reference import ieee_denormals, quantize_rows


def quantize_weight(weight: Tensor, *, name: str, expert: int = 0) -> tuple[Tensor, Tensor]:
    """Quantise one float matrix ``[N, K]`` -> int8 ``[N, K]``, fp32 scales ``[N]``.

    Raises:
        UnsupportedInputError: it holds a NaN or an Inf; the text names ``name``, expert and row.
    """
    if not weight.is_floating_point():
        raise UnsupportedInputError(f"{name} is {weight.dtype}; give float32, bfloat16 or float16 weights")
    with torch.no_grad(), ieee_denormals():
        q, scales = quantize_rows(weight.detach().to(torch.float32))
    bad = torch.isnan(scales).nonzero().flatten().tolist()
    if bad:
        raise UnsupportedInputError(
            f"{name} of expert {expert} holds a NaN or an Inf in row {bad[0]} ({len(bad)} such rows); "
            "the checkpoint is damaged"
        )
    return q, scales


def quantize_experts(w13: Tensor, w2: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantise the experts of a layer, each output row with a scale of its own.

    Args:
        w13: ``[E, 2I, H]`` gate rows first (``[E, I, H]`` without a gate), float32, bfloat16 or float16.
        w2: ``[E, H, I]``, the same.

    Returns:
        w13_weight int8, w13_weight_scale fp32 ``[E, 2I]``, w2_weight int8, w2_weight_scale fp32 ``[E, H]``.

    Raises:
        UnsupportedInputError: a NaN or an Inf, naming expert and row; or shapes that do not belong together.
    """
    if w13.dim() != 3 or w2.dim() != 3 or w13.shape[0] != w2.shape[0] or w13.shape[2] != w2.shape[1]:
        raise UnsupportedInputError(
            f"w13 {list(w13.shape)} and w2 {list(w2.shape)}: give [E, 2I or I, H] and [E, H, I]"
        )
    if w13.shape[1] not in (w2.shape[2], 2 * w2.shape[2]):
        raise UnsupportedInputError(
            f"w13 has {w13.shape[1]} rows and w2 {w2.shape[2]} columns: give 2I (with a gate) or I rows for I columns"
        )
    results = []
    for name, weight in (("w13", w13), ("w2", w2)):
        experts, rows, _ = weight.shape
        values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
        scales = torch.empty((experts, rows), dtype=torch.float32, device=weight.device)
        for expert in range(experts):
            values[expert], scales[expert] = quantize_weight(weight[expert], name=name, expert=expert)
        results += [values, scales]
    return results[0], results[1], results[2], results[3]
