"""Finds the quantised linears of a checkpoint outside the routed experts, and reads them.

What counts is how a weight is stored: as floats it is left to transformers, as int8 with one scale a row or one
in all it is ours, and everything else is refused before a tensor is read. Imports no transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ...checkpoint.files import TensorEntry
from ...checkpoint.layer_check import ZERO_POINTS
from ...checkpoint.quant_config import Group, QuantConfig
from ...errors import CheckpointError

FLOATS = ("BF16", "F16", "F32")
OTHER_FORMATS = ("weight_packed", "qweight", "weight_shape", "weight_scale_inv")


class StoredLinear(NamedTuple):
    """Where a quantised linear is stored."""

    weight: TensorEntry
    scale: TensorEntry
    zero_points: tuple[TensorEntry, ...]
    weights_alone: bool
    """Activations stay as they are: the weights are dequantised."""

    def entries(self) -> tuple[TensorEntry, ...]:
        """Every tensor that it is read from."""
        return (self.weight, self.scale, *self.zero_points)


def find_linear(
    names: Sequence[str], linear: nn.Linear, tensors: Mapping[str, TensorEntry], quantization: QuantConfig | None
) -> StoredLinear | None:
    """The stored int8 weight of one linear; None when it is stored as floats, or not at all.

    Args:
        names: of the module; the first one that is stored is meant.
        linear: the module itself, which may be on the meta device.
        tensors: every tensor of the checkpoint.
        quantization: what the checkpoint says about quantisation; None = int8 and its scales say it all.

    Raises:
        CheckpointError: it is quantised in a way that is not supported, or not stored whole.
    """
    parts = ("weight", *OTHER_FORMATS)
    name = next((n for n in names if any(f"{n}.{part}" in tensors for part in parts)), names[0])
    weight = tensors.get(f"{name}.weight")
    foreign = [entry for part in OTHER_FORMATS if (entry := tensors.get(f"{name}.{part}"))]
    if foreign:
        _group(name, names, foreign[0], quantization)  # which says it better
        raise CheckpointError(f"{foreign[0].file}: {name} has a {foreign[0].name.rpartition('.')[2]}; {_WANTED}")
    if weight is None or weight.dtype in FLOATS:
        return None
    group = _group(name, names, weight, quantization)
    if weight.dtype != "I8":
        raise CheckpointError(f"{weight.file}: {weight.name} is {weight.dtype}; {_WANTED}")
    wanted = (linear.out_features, linear.in_features)
    if weight.shape != wanted:
        raise CheckpointError(f"{weight.file}: {weight.name} is {list(weight.shape)}; {list(wanted)} is wanted")
    if f"{name}.input_scale" in tensors:
        raise CheckpointError(f"{weight.file}: {name} has a static input_scale; {_WANTED}")
    scale = tensors.get(f"{name}.weight_scale")
    if scale is None:
        raise CheckpointError(f"{weight.file}: {weight.name} is int8 and {name}.weight_scale is not stored")
    rows = wanted[0]
    shapes: dict[str, tuple[tuple[int, ...], ...]] = {"channel": ((rows, 1), (rows,)), "tensor": ((1,), (1, 1), ())}
    allowed = shapes.get(group.strategy) if group is not None else None
    if scale.dtype not in FLOATS or scale.shape not in (allowed or shapes["channel"] + shapes["tensor"]):
        said = "" if group is None else f", and {group.name} says strategy {group.strategy}"
        raise CheckpointError(f"{scale.file}: {scale.name} is {scale.dtype} {list(scale.shape)}{said}; {_WANTED}")
    zero_points = tuple(entry for part in ZERO_POINTS if (entry := tensors.get(f"{name}.{part}")))
    return StoredLinear(weight, scale, zero_points, group is not None and group.weights_alone)


def _group(name: str, names: Sequence[str], entry: TensorEntry, quantization: QuantConfig | None) -> Group | None:
    """The group of a linear whose weight is not stored as floats; CheckpointError when it cannot be served."""
    if quantization is None:
        return None
    group = quantization.group_for(tuple(names))
    if group is None:
        raise CheckpointError(
            f"{entry.file}: {entry.name} is {entry.dtype}, and quantization_config leaves {name} unquantised (ignore "
            "list or targets); quantise the checkpoint again"
        )
    if group.refusal is not None and not group.weights_alone:
        raise CheckpointError(
            f"{entry.file}: {name} is in {group.name} (strategy {group.strategy}), and has {group.refusal}; {_WANTED}"
        )
    return group


_WANTED = (
    "linears outside the experts are read as floats, or as symmetric int8 with one scale a row or one in all, whose "
    "activations are quantised per token when the layer runs, or not at all"
)


class LinearReader:
    """Reads stored linears; each file is mapped once."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._open: dict[Path, Any] = {}

    def __enter__(self) -> LinearReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def read(self, stored: StoredLinear) -> tuple[Tensor, Tensor]:
        """int8 ``[N, K]``, a view of the file, and fp32 scales ``[N]``.

        Raises:
            CheckpointError: the file cannot be read, a scale is NaN, infinite or negative, or zero points are not 0.
        """
        weight = self._tensor(stored.weight)
        scale = self._tensor(stored.scale).to(torch.float32).reshape(-1).expand(weight.shape[0]).contiguous()
        if not bool((torch.isfinite(scale) & (scale >= 0)).all()):
            raise CheckpointError(
                f"{stored.scale.file}: {stored.scale.name} holds a NaN, an Inf or a negative number; "
                "scales are finite and not negative"
            )
        for zero_point in stored.zero_points:
            if bool((self._tensor(zero_point) != 0).any()):
                raise CheckpointError(
                    f"{zero_point.file}: {zero_point.name} is not all zero (asymmetric weights); {_WANTED}"
                )
        return weight, scale

    def _tensor(self, entry: TensorEntry) -> Tensor:
        try:
            if entry.file not in self._open:
                self._open[entry.file] = self._stack.enter_context(safe_open(str(entry.file), framework="pt"))
            tensor: Tensor = self._open[entry.file].get_tensor(entry.name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{entry.file}: {entry.name} cannot be read: {error}") from None
        return tensor


def spellings(name: str, base_model_prefix: str) -> Sequence[str]:
    """How a module of the model may be called in the checkpoint: with and without the base model's prefix."""
    prefix = f"{base_model_prefix}."
    if not base_model_prefix:
        return (name,)
    return (name, name.removeprefix(prefix) if name.startswith(prefix) else prefix + name)
