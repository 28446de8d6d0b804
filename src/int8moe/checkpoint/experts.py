"""What is known of a layer's experts: where each part is stored, and what the names on disk say. Imports no torch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ..contracts import MoEConfig
from .faults import Faults, Kind
from .files import TensorEntry
from .models import Model
from .names import Naming, experts_place

FLOATS = ("BF16", "F16", "F32")


class Part(NamedTuple):
    """One projection of one expert.

    The weight ``[out, in]`` is ``weight``, or ``weight[expert]`` of a fused tensor; then transposed where that says
    so; then the rows ``slice(*rows)`` of it. Scale, zero points and bias are vectors over the same rows before that
    slice, or hold one number for all.
    """

    weight: TensorEntry
    scale: TensorEntry | None = None
    zero_points: tuple[TensorEntry, ...] = ()
    bias: TensorEntry | None = None
    expert: int | None = None
    rows: tuple[int, int, int] | None = None
    transposed: bool = False

    def entries(self) -> Iterator[TensorEntry]:
        """Every tensor that the part is read from."""
        yield self.weight
        yield from self.zero_points
        for entry in (self.scale, self.bias):
            if entry is not None:
                yield entry


class ExpertParts(NamedTuple):
    """The three projections of one expert."""

    gate: Part
    up: Part
    down: Part


class Router(NamedTuple):
    """What is stored of a layer's router; None where the checkpoint has no such tensor.

    ``bias`` is added to the logits, ``correction_bias`` to the scores by which experts are chosen.
    """

    weight: TensorEntry | None = None
    bias: TensorEntry | None = None
    correction_bias: TensorEntry | None = None


@dataclass(frozen=True)
class LayerPlan:
    """One MoE layer of a checkpoint.

    Attributes:
        key: module name that transformers gives the experts.
        index: number of the layer.
        config: what the layer computes.
        quantized: stored as int8 with scales.
        dtype: of the stored weights, as safetensors spells it.
        nbytes: bytes of the layer's expert tensors on disk.
        num_tensors: how many those are.
        router: the router's weight; None when it is not stored under the name that the model gives it.
        experts: where each expert is stored.
        router_tensors: the router's weight and biases.
    """

    key: str
    index: int
    config: MoEConfig
    quantized: bool
    dtype: str
    nbytes: int
    num_tensors: int
    router: TensorEntry | None
    experts: tuple[ExpertParts, ...] = field(repr=False)
    router_tensors: Router = field(default=Router(), repr=False)


@dataclass
class StoredLayer:
    """The expert tensors of one layer as they are named on disk."""

    slots: dict[tuple[int | None, str], dict[str, TensorEntry]] = field(default_factory=dict)
    namings: Counter[Naming] = field(default_factory=Counter)
    unknown: list[TensorEntry] = field(default_factory=list)
    entries: list[TensorEntry] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(entry.nbytes for entry in self.entries)


class StoredExperts(NamedTuple):
    """The routed experts' tensors of a checkpoint.

    ``layers`` by number (-1 collects names that hold none), ``drafts`` by the module of a multi-token-prediction
    head outside the model's layers.
    """

    layers: dict[int, StoredLayer]
    drafts: dict[str, StoredLayer]


def sort_experts(tensors: Iterable[TensorEntry], model: Model, faults: Faults) -> StoredExperts:
    """Sort the routed experts' tensors by layer."""
    layers: dict[int, StoredLayer] = defaultdict(StoredLayer)
    drafts: dict[str, StoredLayer] = defaultdict(StoredLayer)
    for entry in tensors:
        place = experts_place(entry.name)
        if place is None:
            continue
        if place.draft:
            drafts[place.draft].entries.append(entry)
            continue
        layer = layers[place.layer]
        layer.entries.append(entry)
        parsed = model.family.parse(entry.name)
        if parsed is None:
            layer.unknown.append(entry)
            continue
        naming, slot = parsed
        layer.namings[naming] += 1
        stored = layer.slots.setdefault((slot.expert, slot.role), {})
        other = stored.setdefault(slot.suffix, entry)
        if other is not entry:
            faults.add(Kind.LEFTOVER, f"{entry.name} says the same as {other.name}")
    return StoredExperts(dict(layers), dict(drafts))
