"""``inspect_checkpoint``: what a checkpoint holds, from config.json and headers alone. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import CheckpointError
from .experts import ExpertParts, LayerPlan, Part, Router, StoredExperts, StoredLayer, sort_experts
from .faults import Faults, Kind
from .files import TensorEntry, checkpoint_directory, read_json, read_tensors
from .layer_check import LayerCheck
from .models import Model, Routing, find_family, read_model
from .names import with_and_without_prefix
from .quant_config import QuantConfig
from .schemes import read_quantization, refuse_all, refuse_unsupported
from .unknown_model import recognise_model

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
class SkippedLayer:
    """Experts of a multi-token-prediction head: no part of the model, and not read.

    They lie past num_hidden_layers, or in a module of their own (``mtp.layers.0``), which is ``name``.
    """

    name: str
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
        skipped: layers outside the model that hold experts.
        routing: how router logits become weights.
        tensors: every tensor of the checkpoint by name, as the headers have it.
        quantization: what the checkpoint says about quantisation; None when it says nothing.
    """

    path: Path
    model_type: str
    scheme: str
    num_hidden_layers: int
    layers: tuple[LayerPlan, ...]
    skipped: tuple[SkippedLayer, ...]
    routing: Routing
    tensors: Mapping[str, TensorEntry] = field(repr=False, compare=False)
    quantization: QuantConfig | None = field(repr=False, compare=False)

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

    Raises CheckpointError, in one line: for a scheme that is not supported before any safetensors file is opened
    (before any tensor is read, where model_type is unknown and names come from the headers), else with everything
    that is missing, left over, misshapen or damaged.
    """
    directory = checkpoint_directory(path)
    config_file = directory / "config.json"
    config = read_json(config_file)
    family = find_family(config, config_file)
    if family is not None:
        model = read_model(config, family, config_file)
        quantization = read_quantization(config, config_file)
        if quantization is not None:
            refuse_unsupported(quantization, model, config_file)
        tensors = read_tensors(directory)
    else:
        quantization = read_quantization(config, config_file)
        if quantization is not None:
            refuse_all(quantization, config_file)
        tensors = read_tensors(directory)
        model = recognise_model(config, tensors, config_file)
        if quantization is not None:
            refuse_unsupported(quantization, model, config_file)

    faults = Faults(directory)
    stored = sort_experts(tensors.values(), model, faults)
    layers = []
    for index in model.moe_layers:
        check = LayerCheck(index, stored.layers.pop(index, StoredLayer()), model, quantization, faults)
        plan = check.plan(_router(tensors, model, index))
        if plan is not None:
            layers.append(plan)
    skipped = _skipped(stored, model, faults)
    faults.raise_if_any()
    return CheckpointPlan(
        path=directory,
        model_type=model.family.model_type,
        scheme=_scheme(quantization, layers),
        num_hidden_layers=model.num_hidden_layers,
        layers=tuple(layers),
        skipped=skipped,
        routing=model.routing,
        tensors=tensors,
        quantization=quantization,
    )


def _scheme(quantization: QuantConfig | None, layers: list[LayerPlan]) -> str:
    if quantization is not None:
        return quantization.description
    return "int8 by its names" if any(layer.quantized for layer in layers) else "unquantised"


def _router(tensors: Mapping[str, TensorEntry], model: Model, layer: int) -> Router:
    for template in model.family.routers:
        for name in with_and_without_prefix(template.format(layer=layer)):
            if (weight := tensors.get(name)) is not None:
                module = name.removesuffix(".weight")
                return Router(weight, tensors.get(f"{module}.bias"), tensors.get(f"{module}.e_score_correction_bias"))
    return Router()


def _skipped(rest: StoredExperts, model: Model, faults: Faults) -> tuple[SkippedLayer, ...]:
    """The layers outside the model; what is left otherwise is a fault."""
    skipped = []
    for index, stored in sorted(rest.layers.items()):
        if index >= model.num_hidden_layers:
            # Up to the number: the rest of a name differs from tensor to tensor.
            name = stored.entries[0].name.partition(f"layers.{index}.")[0] + f"layers.{index}"
            skipped.append(SkippedLayer(name, index, len(stored.entries), stored.nbytes))
            continue
        first = min(entry.name for entry in stored.entries)
        where = "outside the layers" if index < 0 else f"in layer {index}, which config.json says is dense"
        faults.add(Kind.LEFTOVER, f"{_count(stored.entries)} {where}, such as {first}")
    for name, stored in sorted(rest.drafts.items()):
        number = int(tail) if (tail := name.rpartition(".")[2]).isdecimal() else 0
        skipped.append(SkippedLayer(name, number, len(stored.entries), stored.nbytes))
    return tuple(skipped)


def _count(entries: list[TensorEntry]) -> str:
    return f"{len(entries)} tensor{'' if len(entries) == 1 else 's'}"
