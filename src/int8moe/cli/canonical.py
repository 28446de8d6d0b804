"""A few experts of a checkpoint as canonical tensors, for the reference.

This is a second reader on purpose: it shares no code with the one that fills the layers, so that a fault there
(gate and up swapped, the scales of another expert) shows as bits that differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from ..quantize import quantize_weight

if TYPE_CHECKING:
    from ..checkpoint.experts import LayerPlan, Part


class Canonical(NamedTuple):
    """Tensors as ``reference.fused_experts`` takes them; the first dimension is the experts that were asked for."""

    w13_weight: Tensor
    w13_weight_scale: Tensor
    w2_weight: Tensor
    w2_weight_scale: Tensor


def read_experts(layer: LayerPlan, experts: Sequence[int]) -> Canonical:
    """Read experts by id; those that are stored in floats are quantised row by row."""
    rows = []
    with ExitStack() as stack:
        files = _Files(stack)
        for expert in experts:
            parts = layer.experts[expert]
            gate, gate_scale = _projection(parts.gate, expert, files)
            up, up_scale = _projection(parts.up, expert, files)
            down, down_scale = _projection(parts.down, expert, files)
            rows.append((torch.cat([gate, up]), torch.cat([gate_scale, up_scale]), down, down_scale))
    w13, w13_scale, w2, w2_scale = (torch.stack(tensors) for tensors in zip(*rows, strict=True))
    return Canonical(w13, w13_scale, w2, w2_scale)


class _Files:
    """The files in use, each opened once."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._open: dict[Path, Any] = {}

    def __getitem__(self, path: Path) -> Any:
        if path not in self._open:
            self._open[path] = self._stack.enter_context(safe_open(path, framework="pt"))
        return self._open[path]


def _projection(part: Part, expert: int, files: _Files) -> tuple[Tensor, Tensor]:
    """int8 ``[N, K]`` and fp32 ``[N]`` of one projection."""
    stored = files[part.weight.file].get_slice(part.weight.name)
    start, stop = part.rows or (0, None)
    weight: Tensor = stored[start:stop] if part.expert is None else stored[part.expert, start:stop]
    if weight.dim() == 3:
        weight = weight.squeeze(0)
    if part.scale is None:
        return quantize_weight(weight, name=part.weight.name, expert=expert)
    scale: Tensor = files[part.scale.file].get_tensor(part.scale.name)
    return weight, scale.to(torch.float32).reshape(-1).expand(weight.shape[0]).contiguous()
