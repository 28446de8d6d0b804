"""``inspect_checkpoint``: what a checkpoint holds, from config.json and headers alone. Imports no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError
from .experts import ExpertParts, LayerCheck, LayerPlan, Part, StoredLayer, sort_experts
from .faults import Faults, Kind
from .files import TensorEntry, checkpoint_directory, read_json, read_tensors
from .models import Model, read_model
from .schemes import read_quantization, refuse_unsupported

__all__ = [
    "CheckpointPlan",
    "ExpertParts",
    "LayerPlan",
    "Part",
    "Routing",
    "SkippedLayer",
    "inspect_checkpoint",
]


@dataclass(frozen=True)
class Routing:
    """How the model turns router logits into weights; the arguments of ``routing.select_experts``."""

    scoring: str
    renormalize: bool


@dataclass(frozen=True)
class SkippedLayer:
    """Experts past num_hidden_layers (multi-token prediction): no part of the model, and not read."""

    index: int
    num_tensors: int
    nbytes: int


@dataclass(frozen=True)
class CheckpointPlan:
    """What a checkpoint holds, and where.

    Attributes:
        path: its directory.
        model_type: as config.json has it.
        scheme: how it is quantised, for people; "unquantised" without a quantization_config.
        num_hidden_layers: layers of the model, dense ones included.
        layers: its MoE layers, in order.
        skipped: layers past num_hidden_layers that hold experts.
        routing: how router logits become weights.
    """

    path: Path
    model_type: str
    scheme: str
    num_hidden_layers: int
    layers: tuple[LayerPlan, ...]
    skipped: tuple[SkippedLayer, ...]
    routing: Routing

    def layer(self, which: int | str | LayerPlan) -> LayerPlan:
        """One layer by its number or key."""
        if isinstance(which, LayerPlan):
            return which
        for layer in self.layers:
            if which in (layer.index, layer.key):
                return layer
        known = ", ".join(str(layer.index) for layer in self.layers)
        raise CheckpointError(f"{self.path}: layer {which} is not an MoE layer of this model; those are {known}")


def inspect_checkpoint(path: str | os.PathLike[str]) -> CheckpointPlan:
    """Read config.json and the headers of the safetensors files, and match every expert tensor with its use.

    Raises CheckpointError, in one line: for a model or scheme that is not supported before any safetensors
    file is opened, else with everything that is missing, left over, misshapen or damaged.
    """
    directory = checkpoint_directory(path)
    config_file = directory / "config.json"
    config = read_json(config_file)
    model = read_model(config, config_file)
    quantization = read_quantization(config, config_file)
    if quantization is not None:
        refuse_unsupported(quantization, model, config_file)

    tensors = read_tensors(directory)
    faults = Faults(directory)
    stored = sort_experts(tensors.values(), model, faults)
    layers = []
    for index in model.moe_layers:
        check = LayerCheck(index, stored.pop(index, StoredLayer()), model, quantization, faults)
        plan = check.plan(tensors.get(model.family.router.format(layer=index)))
        if plan is not None:
            layers.append(plan)
    skipped = _skipped(stored, model, faults)
    faults.raise_if_any()
    return CheckpointPlan(
        path=directory,
        model_type=model.family.model_type,
        scheme="unquantised" if quantization is None else quantization.description,
        num_hidden_layers=model.num_hidden_layers,
        layers=tuple(layers),
        skipped=skipped,
        routing=Routing(model.family.scoring, model.renormalize),
    )


def _skipped(rest: dict[int, StoredLayer], model: Model, faults: Faults) -> tuple[SkippedLayer, ...]:
    """The layers past the model; what is left otherwise is a fault."""
    skipped = []
    for index, stored in sorted(rest.items()):
        if index >= model.num_hidden_layers:
            skipped.append(SkippedLayer(index, len(stored.entries), _nbytes(stored.entries)))
            continue
        first = min(entry.name for entry in stored.entries)
        where = "outside the layers" if index < 0 else f"in layer {index}, which config.json says is dense"
        faults.add(Kind.LEFTOVER, f"{_count(stored.entries)} {where}, such as {first}")
    return tuple(skipped)


def _count(entries: list[TensorEntry]) -> str:
    return f"{len(entries)} tensor{'' if len(entries) == 1 else 's'}"


def _nbytes(entries: list[TensorEntry]) -> int:
    return sum(entry.nbytes for entry in entries)
