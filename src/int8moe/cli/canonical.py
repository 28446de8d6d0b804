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
    from ..checkpoint.files import TensorEntry


class Canonical(NamedTuple):
    """Tensors as ``reference.fused_experts`` takes them; the first dimension is the experts that were asked for."""

    w13_weight: Tensor
    w13_weight_scale: Tensor
    w2_weight: Tensor
    w2_weight_scale: Tensor
    w13_bias: Tensor | None = None
    w2_bias: Tensor | None = None

    def select(self, experts: Sequence[int]) -> Canonical:
        """The tensors of some of the experts."""
        return self._replace(**{name: t[list(experts)] for name, t in self._asdict().items() if t is not None})


def read_experts(layer: LayerPlan, experts: Sequence[int]) -> Canonical:
    """Read experts by id; those that are stored in floats are quantised row by row."""
    rows = []
    with ExitStack() as stack:
        files = _Files(stack)
        for expert in experts:
            gate, up, down = (_projection(part, expert, files) for part in layer.experts[expert])
            w13 = [torch.cat(pair) for pair in zip(gate, up, strict=True)]
            rows.append((w13[0], w13[1], down[0], down[1], w13[2], down[2]))
    tensors = [torch.stack(column) for column in zip(*rows, strict=True)]
    return Canonical(*(tensors if layer.config.has_bias else tensors[:4]))


class _Files:
    """The files in use, each opened once."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._open: dict[Path, Any] = {}

    def __getitem__(self, path: Path) -> Any:
        if path not in self._open:
            self._open[path] = self._stack.enter_context(safe_open(path, framework="pt"))
        return self._open[path]


def _projection(part: Part, expert: int, files: _Files) -> tuple[Tensor, Tensor, Tensor]:
    """int8 ``[N, K]``, fp32 scales ``[N]`` and the bias ``[N]`` (zeros without one) of one projection."""
    weight = _of_expert(part, part.weight, files)
    if part.transposed:
        weight = weight.transpose(0, 1)
    chosen = range(weight.shape[0])[slice(*(part.rows or (None,)))]
    weight = weight[list(chosen)]
    bias = torch.zeros(len(chosen)) if part.bias is None else _vector(part, part.bias, files)[list(chosen)]
    if part.scale is None:
        return (*quantize_weight(weight, name=part.weight.name, expert=expert), bias)
    scale = _vector(part, part.scale, files)
    return weight, scale.expand(len(chosen)) if scale.numel() == 1 else scale[list(chosen)], bias


def _of_expert(part: Part, entry: TensorEntry, files: _Files) -> Tensor:
    """The part of a tensor that belongs to the expert; of a fused tensor no other expert is read."""
    if part.expert is None:
        tensor: Tensor = files[entry.file].get_tensor(entry.name)
        return tensor
    rows: Tensor = files[entry.file].get_slice(entry.name)[part.expert : part.expert + 1]
    return rows[0]


def _vector(part: Part, entry: TensorEntry, files: _Files) -> Tensor:
    return _of_expert(part, entry, files).to(torch.float32).flatten()
