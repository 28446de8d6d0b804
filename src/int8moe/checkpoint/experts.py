"""Matches every stored expert tensor of a layer with its one use, by name, shape and dtype. Imports no torch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ..contracts import MoEConfig
from .compressed_tensors import QuantConfig
from .faults import Faults, Kind, number_ranges
from .files import TensorEntry
from .models import Model, Naming, experts_layer

FLOATS = ("BF16", "F16", "F32")

_HINTS = {
    "weight_scale": "scales beside weights that are not quantised",
    "weight_zero_point": "zero points beside weights that are not quantised",
    "input_scale": "static activation scales",
    "weight_packed": "packed weights",
    "bias": "this model has no biases",
}


class Part(NamedTuple):
    """One projection of one expert: ``weight[expert, rows]`` where those are given, and what belongs to it."""

    weight: TensorEntry
    scale: TensorEntry | None = None
    zero_point: TensorEntry | None = None
    expert: int | None = None
    rows: tuple[int, int] | None = None


class ExpertParts(NamedTuple):
    """The three projections of one expert."""

    gate: Part
    up: Part
    down: Part


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


@dataclass
class StoredLayer:
    """The expert tensors of one layer as they are named on disk."""

    slots: dict[tuple[int | None, str], dict[str, TensorEntry]] = field(default_factory=dict)
    namings: Counter[Naming] = field(default_factory=Counter)
    unknown: list[TensorEntry] = field(default_factory=list)
    entries: list[TensorEntry] = field(default_factory=list)


def sort_experts(tensors: Iterable[TensorEntry], model: Model, faults: Faults) -> dict[int, StoredLayer]:
    """Sort the routed experts' tensors by layer; -1 collects those whose names hold no layer."""
    layers: dict[int, StoredLayer] = defaultdict(StoredLayer)
    for entry in tensors:
        index = experts_layer(entry.name)
        if index is None:
            continue
        layer = layers[index]
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
    return dict(layers)


class LayerCheck:
    """Checks one layer and makes its plan; faults are collected, not raised."""

    def __init__(
        self, index: int, stored: StoredLayer, model: Model, quantization: QuantConfig | None, faults: Faults
    ) -> None:
        self._index, self._stored, self._model = index, stored, model
        self._quantization, self._faults = quantization, faults
        # Where spellings are mixed, the most frequent one is meant, and the rest is left over.
        common = stored.namings.most_common(1)
        self._naming = naming = common[0][0] if common else model.family.namings[0]
        self._module = naming.module.format(layer=index)
        experts: Iterable[int | None] = [None] if naming.fused else range(model.moe.num_experts)
        self._expected = {(expert, role) for expert in experts for role in naming.roles}
        self._groups: dict[tuple[int | None, str], str | None] = {}

    def plan(self, router: TensorEntry | None) -> LayerPlan | None:
        """The layer's plan, or None after noting why there is none."""
        if not self._stored.slots:
            self._faults.add(Kind.MISSING, f"{self._module}: no expert of this layer is stored")
            self._leftovers(False)
            return None
        quantized = self._is_quantized()
        if quantized is None:
            return None
        complete = self._missing(quantized)
        self._leftovers(quantized)
        sound = self._shapes(quantized)
        if not (complete and sound):
            return None
        dtypes = {self._stored.slots[key]["weight"].dtype for key in self._expected}
        return LayerPlan(
            key=self._model.family.experts.format(layer=self._index),
            index=self._index,
            config=self._model.moe,
            quantized=quantized,
            dtype="/".join(sorted(dtypes)),
            nbytes=sum(entry.nbytes for entry in self._stored.entries),
            num_tensors=len(self._stored.entries),
            router=router,
            experts=tuple(self._expert(expert) for expert in range(self._model.moe.num_experts)),
        )

    def _is_quantized(self) -> bool | None:
        """Whether the layer's weights are int8; None when they are neither all int8 nor all float."""
        by_dtype: dict[str, list[tuple[int | None, str]]] = defaultdict(list)
        for key, suffixes in self._stored.slots.items():
            if "weight" in suffixes and key in self._expected:
                by_dtype[suffixes["weight"].dtype].append(key)
        if not by_dtype:
            kinds = ", ".join(sorted({suffix for suffixes in self._stored.slots.values() for suffix in suffixes}))
            self._faults.add(Kind.MISSING, f"{self._module}: no expert has a weight (found {kinds})")
            return None
        if "I8" in by_dtype and not self._naming.fused and set(by_dtype) <= {"I8"}:
            return True if self._is_quantized_by_config(by_dtype["I8"]) else None
        if set(by_dtype) <= set(FLOATS):
            return False
        held = "; ".join(f"{dtype} in {self._of(keys)}" for dtype, keys in by_dtype.items())
        if set(by_dtype) <= {"I8", *FLOATS} and len(by_dtype) > 1:
            self._faults.add(Kind.MIXED, f"{self._module}: {held}")
        elif self._naming.fused:
            self._faults.add(Kind.DTYPE, f"{self._module}: {held} (fused 3-D experts are read from floats only)")
        else:
            self._faults.add(Kind.DTYPE, f"{self._module}: {held}")
        return None

    def _is_quantized_by_config(self, keys: list[tuple[int | None, str]]) -> bool:
        if self._quantization is None:
            self._faults.add(Kind.CONFIG, f"{self._module}: I8 weights, but config.json has no quantization_config")
            return False
        left_alone: list[tuple[int | None, str]] = []
        for expert, role in keys:
            assert expert is not None
            group = self._quantization.group_for(self._model.family.aliases(self._index, expert, role))
            self._groups[expert, role] = group.strategy if group else None
            if group is None:
                left_alone.append((expert, role))
        if left_alone:
            self._faults.add(
                Kind.CONFIG,
                f"{self._module}: {self._of(left_alone)}: I8 weights, but quantization_config leaves them "
                "unquantised (ignore list or targets)",
            )
        return not left_alone

    def _missing(self, quantized: bool) -> bool:
        lacking: dict[str, list[int]] = defaultdict(list)
        absent = []
        for expert in sorted({expert for expert, _ in self._expected}, key=lambda e: -1 if e is None else e):
            number = -1 if expert is None else expert
            wanted = [
                (role, suffix)
                for role in self._naming.roles
                for suffix in (("weight", "weight_scale") if quantized else ("weight",))
            ]
            lacks = [w for w in wanted if w[1] not in self._stored.slots.get((expert, w[0]), {})]
            if len(lacks) == len(wanted):
                absent.append(number)
                continue
            for role, suffix in lacks:
                lacking[self._short(role, suffix)].append(number)
        files = ", ".join(sorted({entry.file.name for entry in self._stored.entries}))
        if absent:
            declared = f"{self._model.fields['num_experts']} is {self._model.moe.num_experts}"
            self._faults.add(
                Kind.MISSING,
                f"{self._module}: experts {number_ranges(absent)} are absent from {files} ({declared})",
            )
        for short, experts in lacking.items():
            if self._naming.fused:
                self._faults.add(Kind.MISSING, f"{self._module}.{short} is not in {files}")
            else:
                self._faults.add(
                    Kind.MISSING, f"{self._module}: experts {number_ranges(experts)} lack {short} in {files}"
                )
        return not (absent or lacking)

    def _leftovers(self, quantized: bool) -> None:
        used = {"weight", "weight_scale", "weight_zero_point"} if quantized else {"weight"}
        surplus: set[int] = set()
        left: dict[tuple[str, str], list[tuple[int | None, str]]] = defaultdict(list)
        for (expert, role), suffixes in self._stored.slots.items():
            if (expert, role) not in self._expected and expert is not None and not self._naming.fused:
                surplus.add(expert)
                continue
            for suffix in suffixes:
                if (expert, role) not in self._expected or suffix not in used:
                    left[role, suffix].append((expert, role))
        if surplus:
            declared = f"{self._model.fields['num_experts']} is {self._model.moe.num_experts}"
            self._faults.add(Kind.LEFTOVER, f"{self._module}: experts {number_ranges(surplus)} ({declared})")
        for (_, suffix), keys in left.items():
            names = sorted(self._stored.slots[key][suffix].name for key in keys)
            hint = f" ({_HINTS[suffix]})" if suffix in _HINTS else ""
            experts = [expert for expert, _ in keys if expert is not None]
            of = f" of experts {number_ranges(experts)}" if experts else ""
            self._faults.add(Kind.LEFTOVER, f"{self._module}: {suffix}{of}, such as {names[0]}{hint}")
        for entry in self._stored.unknown:
            self._faults.add(Kind.LEFTOVER, f"{entry.name} in {entry.file.name}")

    def _shapes(self, quantized: bool) -> bool:
        off: dict[str, list[tuple[int | None, str]]] = defaultdict(list)
        bad_dtype: dict[str, list[tuple[int | None, str]]] = defaultdict(list)
        for key in sorted(self._expected & set(self._stored.slots), key=str):
            suffixes = self._stored.slots[key]
            shape = self._shape(key[1])
            if (weight := suffixes.get("weight")) is not None and weight.shape != shape:
                off[f"{list(weight.shape)}, not {list(shape)}, for {self._short(key[1], 'weight')}"].append(key)
            if quantized and (scale := suffixes.get("weight_scale")) is not None:
                strategy = self._groups.get(key) or "channel"
                allowed = [(), (1,), (1, 1)] if strategy == "tensor" else [(shape[0],), (shape[0], 1)]
                name = self._short(key[1], "weight_scale")
                if scale.shape not in allowed:
                    wanted = " or ".join(str(list(shape)) for shape in reversed(allowed))
                    off[f"{list(scale.shape)}, not {wanted} (strategy {strategy}), for {name}"].append(key)
                if scale.dtype not in FLOATS:
                    bad_dtype[f"{scale.dtype} for {name}"].append(key)
        sizes = ", ".join(
            f"{self._model.fields[name]} {getattr(self._model.moe, name)}"
            for name in ("hidden_size", "intermediate_size")
        )
        for text, keys in off.items():
            self._faults.add(Kind.SHAPE, f"{self._module}: {text}{self._in(keys)} (config.json: {sizes})")
        for text, keys in bad_dtype.items():
            self._faults.add(Kind.DTYPE, f"{self._module}: {text}{self._in(keys)}")
        return not (off or bad_dtype)

    def _shape(self, role: str) -> tuple[int, ...]:
        moe = self._model.moe
        shapes = {
            "gate": (moe.intermediate_size, moe.hidden_size),
            "up": (moe.intermediate_size, moe.hidden_size),
            "gate_up": (2 * moe.intermediate_size, moe.hidden_size),
            "down": (moe.hidden_size, moe.intermediate_size),
        }
        return (moe.num_experts, *shapes[role]) if self._naming.fused else shapes[role]

    def _expert(self, expert: int) -> ExpertParts:
        slots, width = self._stored.slots, self._model.moe.intermediate_size
        if self._naming.fused:
            gate_up, down = slots[None, "gate_up"]["weight"], slots[None, "down"]["weight"]
            return ExpertParts(
                gate=Part(gate_up, expert=expert, rows=(0, width)),
                up=Part(gate_up, expert=expert, rows=(width, 2 * width)),
                down=Part(down, expert=expert),
            )
        return ExpertParts(*(_part(slots[expert, role]) for role in ("gate", "up", "down")))

    def _short(self, role: str, suffix: str) -> str:
        name = self._naming.roles.get(role, role)
        return f"{name}{suffix.removeprefix('weight')}" if self._naming.fused else f"{name}.{suffix}"

    def _of(self, keys: list[tuple[int | None, str]]) -> str:
        names = ", ".join(dict.fromkeys(self._naming.roles[role] for _, role in keys))
        experts = number_ranges(expert for expert, _ in keys if expert is not None)
        return f"{names} of experts {experts}" if experts else names

    def _in(self, keys: list[tuple[int | None, str]]) -> str:
        experts = number_ranges(expert for expert, _ in keys if expert is not None)
        return f" of experts {experts}" if experts else ""


def _part(stored: Mapping[str, TensorEntry]) -> Part:
    return Part(stored["weight"], stored.get("weight_scale"), stored.get("weight_zero_point"))
