"""Matches every stored expert tensor of a layer with its one use, by name, shape and dtype. Imports no torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from .experts import FLOATS, ExpertParts, LayerPlan, Part, Router, StoredLayer
from .faults import Faults, Kind, name_experts
from .models import Model
from .names import FUSED_ROLES, with_and_without_prefix
from .quant_config import QuantConfig

ZERO_POINTS = ("weight_zero_point", "weight_offset")
_ZERO_POINT_DTYPES = ("I8", "U8", "I32", "I64", *FLOATS)

_HINTS = {
    "weight_scale": "scales beside weights that are not quantised",
    "weight_zero_point": "zero points beside weights that are not quantised",
    "weight_offset": "offsets beside weights that are not quantised",
    "weight_scale_inv": "block scales",
    "input_scale": "static activation scales",
    "input_offset": "static activation scales",
    "weight_packed": "packed weights",
    "weight_blocks": "4 bit weights in blocks",
    "bias": "this model has no biases",
}

_Key = tuple[int | None, str]  # expert (None = all in one tensor) and role


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
        self._expected: set[_Key] = {(expert, role) for expert in experts for role in naming.roles}
        self._strategies: dict[_Key, str] = {}

    def plan(self, router: Router) -> LayerPlan | None:
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
            nbytes=self._stored.nbytes,
            num_tensors=len(self._stored.entries),
            router=router.weight,
            experts=tuple(self._expert(expert) for expert in range(self._model.moe.num_experts)),
            router_tensors=router,
        )

    def _is_quantized(self) -> bool | None:
        """Whether the layer's weights are int8; None when they are neither all int8 nor all float."""
        by_dtype: dict[str, list[_Key]] = defaultdict(list)
        for key, suffixes in self._stored.slots.items():
            if "weight" in suffixes and key in self._expected:
                by_dtype[suffixes["weight"].dtype].append(key)
        if not by_dtype:
            kinds = ", ".join(sorted({suffix for suffixes in self._stored.slots.values() for suffix in suffixes}))
            self._faults.add(Kind.MISSING, f"{self._module}: no expert has a weight (found {kinds})")
            return None
        if set(by_dtype) == {"I8"}:
            return True if self._agrees_with_config(by_dtype["I8"]) else None
        if set(by_dtype) <= set(FLOATS):
            self._note_unquantised(by_dtype)
            return False
        held = "; ".join(f"{dtype} in {self._of(keys)}" for dtype, keys in by_dtype.items())
        mixed = set(by_dtype) <= {"I8", *FLOATS}
        self._faults.add(Kind.MIXED if mixed else Kind.DTYPE, f"{self._module}: {held}")
        return None

    def _note_unquantised(self, by_dtype: dict[str, list[_Key]]) -> None:
        """Note experts that config.json quantises, and that are stored as floats without scales.

        A tensor of all experts is no Linear: it is meant only where a name or a pattern meets it.
        """
        if self._quantization is None or any("weight_scale" in suffixes for suffixes in self._stored.slots.values()):
            return  # scales are left over, which says more
        least = 2 if self._naming.fused else 1
        for dtype, keys in by_dtype.items():
            groups: dict[str, list[_Key]] = defaultdict(list)
            for expert, role in keys:
                for aliases in self._aliases(expert, role):
                    group = self._quantization.group_for(aliases)
                    if group is not None and group.targets.rank(aliases) >= least:
                        groups[group.name].append((expert, role))
                        break
            for name, contradicting in groups.items():
                text = f"{self._module}: {dtype} in {self._of(contradicting)} ({name})"
                self._faults.add(Kind.NOT_INT8, text)

    def _agrees_with_config(self, keys: list[_Key]) -> bool:
        """Whether config.json quantises all of these; without a quantization_config the names say it."""
        if self._quantization is None:
            return True
        left_alone: list[_Key] = []
        for expert, role in keys:
            strategies = {self._strategy(names) for names in self._aliases(expert, role)}
            if None in strategies:
                left_alone.append((expert, role))
            elif len(strategies) > 1:
                self._faults.add(
                    Kind.CONFIG,
                    f"{self._module}: {self._of([(expert, role)])} is one tensor, and quantization_config gives its "
                    "experts different strategies",
                )
                return False
            else:
                self._strategies[expert, role] = str(strategies.pop())
        if left_alone:
            self._faults.add(
                Kind.CONFIG,
                f"{self._module}: {self._of(left_alone)}: I8 weights, but quantization_config leaves them "
                "unquantised (ignore list or targets)",
            )
        return not left_alone

    def _strategy(self, aliases: tuple[str, ...]) -> str | None:
        group = self._quantization.group_for(aliases) if self._quantization is not None else None
        return None if group is None else group.strategy

    def _aliases(self, expert: int | None, role: str) -> list[tuple[str, ...]]:
        """The names of each projection in a tensor: one for an expert's own, all experts' for a fused one."""
        family = self._model.family
        if expert is not None:
            return [family.aliases(self._index, expert, role)]
        named = (self._naming.linear(self._index, None, role), self._module)
        fused = [alias for name in named for alias in with_and_without_prefix(name)]
        return [
            (*fused, *family.aliases(self._index, one, part))
            for one in range(self._model.moe.num_experts)
            for part in FUSED_ROLES[role]
        ]

    def _wanted(self, quantized: bool) -> tuple[str, ...]:
        biases = ("bias",) if self._model.moe.has_bias else ()
        return ("weight", "weight_scale", *biases) if quantized else ("weight", *biases)

    def _missing(self, quantized: bool) -> bool:
        lacking: dict[str, list[int]] = defaultdict(list)
        absent = []
        for expert in sorted({expert for expert, _ in self._expected}, key=lambda e: -1 if e is None else e):
            number = -1 if expert is None else expert
            wanted = [(role, suffix) for role in self._naming.roles for suffix in self._wanted(quantized)]
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
                f"{self._module}: {name_experts(absent)} {'is' if len(absent) == 1 else 'are'} absent from {files} "
                f"({declared})",
            )
        for short, experts in lacking.items():
            if self._naming.fused:
                self._faults.add(Kind.MISSING, f"{self._module}.{short} is not in {files}")
            else:
                self._faults.add(
                    Kind.MISSING,
                    f"{self._module}: {name_experts(experts)} {'lacks' if len(experts) == 1 else 'lack'} {short} "
                    f"in {files}",
                )
        return not (absent or lacking)

    def _leftovers(self, quantized: bool) -> None:
        used = {*self._wanted(quantized), *(ZERO_POINTS if quantized else ())}
        surplus: set[int] = set()
        left: dict[tuple[str, str], list[_Key]] = defaultdict(list)
        for (expert, role), suffixes in self._stored.slots.items():
            if (expert, role) not in self._expected and expert is not None and not self._naming.fused:
                surplus.add(expert)
                continue
            for suffix in suffixes:
                if (expert, role) not in self._expected or suffix not in used:
                    left[role, suffix].append((expert, role))
        if surplus:
            declared = f"{self._model.fields['num_experts']} is {self._model.moe.num_experts}"
            self._faults.add(Kind.LEFTOVER, f"{self._module}: {name_experts(surplus)} ({declared})")
        for (_, suffix), keys in left.items():
            names = sorted(self._stored.slots[key][suffix].name for key in keys)
            hint = f" ({_HINTS[suffix]})" if suffix in _HINTS else ""
            experts = [expert for expert, _ in keys if expert is not None]
            of = f" of {name_experts(experts)}" if experts else ""
            self._faults.add(Kind.LEFTOVER, f"{self._module}: {suffix}{of}, such as {names[0]}{hint}")
        for entry in self._stored.unknown:
            self._faults.add(Kind.LEFTOVER, f"{entry.name} in {entry.file.name}")

    def _shapes(self, quantized: bool) -> bool:
        off: dict[str, list[_Key]] = defaultdict(list)
        bad_dtype: dict[str, list[_Key]] = defaultdict(list)
        dtypes = {"weight_scale": FLOATS, "bias": FLOATS, **dict.fromkeys(ZERO_POINTS, _ZERO_POINT_DTYPES)}
        for key in sorted(self._expected & set(self._stored.slots), key=str):
            allowed = self._allowed_shapes(key, quantized)
            for suffix, entry in self._stored.slots[key].items():
                short = self._short(key[1], suffix)
                if suffix in allowed and entry.shape not in (shapes := allowed[suffix]):
                    wanted = " or ".join(str(list(shape)) for shape in shapes)
                    strategy = f" (strategy {self._strategies[key]})" if key in self._strategies else ""
                    kind = strategy if suffix == "weight_scale" else ""
                    off[f"{list(entry.shape)}, not {wanted}{kind}, for {short}"].append(key)
                if suffix in dtypes and entry.dtype not in dtypes[suffix]:
                    bad_dtype[f"{entry.dtype} for {short}"].append(key)
        sizes = ", ".join(
            f"{self._model.fields[name]} {getattr(self._model.moe, name)}"
            for name in ("hidden_size", "intermediate_size")
        )
        for text, keys in off.items():
            self._faults.add(Kind.SHAPE, f"{self._module}: {text}{self._in(keys)} (config.json: {sizes})")
        for text, keys in bad_dtype.items():
            self._faults.add(Kind.DTYPE, f"{self._module}: {text}{self._in(keys)}")
        return not (off or bad_dtype)

    def _allowed_shapes(self, key: _Key, quantized: bool) -> dict[str, list[tuple[int, ...]]]:
        """The shapes that the tensors of one projection may have, by suffix."""
        moe, naming = self._model.moe, self._naming
        rows, columns = {
            "gate": (moe.intermediate_size, moe.hidden_size),
            "up": (moe.intermediate_size, moe.hidden_size),
            "gate_up": (2 * moe.intermediate_size, moe.hidden_size),
            "down": (moe.hidden_size, moe.intermediate_size),
        }[key[1]]
        lead = (moe.num_experts,) if naming.fused else ()
        allowed: dict[str, list[tuple[int, ...]]] = {
            "weight": [(*lead, columns, rows) if naming.transposed else (*lead, rows, columns)]
        }
        if moe.has_bias:
            allowed["bias"] = [(*lead, rows)]
        if quantized:
            channel = [(*lead, rows, 1), (*lead, rows)] + ([(*lead, 1, rows)] if naming.transposed else [])
            tensor = [(*lead, 1, 1), (*lead, 1), lead]
            by_strategy = {"channel": channel, "tensor": tensor}
            # Without a quantization_config the shape itself says which of the two it is.
            allowed["weight_scale"] = by_strategy.get(self._strategies.get(key, ""), channel + tensor)
            allowed |= dict.fromkeys(ZERO_POINTS, channel + tensor)
        return allowed

    def _expert(self, expert: int) -> ExpertParts:
        width = self._model.moe.intermediate_size
        if not self._naming.fused:
            return ExpertParts(*(self._part((expert, role)) for role in ("gate", "up", "down")))
        whole = self._part((None, "gate_up"), expert)
        interleaved = ((0, 2 * width, 2), (1, 2 * width, 2))
        halves = interleaved if self._naming.interleaved else ((0, width, 1), (width, 2 * width, 1))
        gate, up = (whole._replace(rows=rows) for rows in halves)
        return ExpertParts(gate, up, self._part((None, "down"), expert))

    def _part(self, key: _Key, expert: int | None = None) -> Part:
        stored = self._stored.slots[key]
        return Part(
            weight=stored["weight"],
            scale=stored.get("weight_scale"),
            zero_points=tuple(stored[suffix] for suffix in ZERO_POINTS if suffix in stored),
            bias=stored.get("bias"),
            expert=expert,
            transposed=self._naming.transposed,
        )

    def _short(self, role: str, suffix: str) -> str:
        name = self._naming.roles.get(role, role)
        if not self._naming.fused:
            return f"{name}.{suffix}"
        rest = suffix.removeprefix("weight")
        return f"{name}{rest}" if rest.startswith("_") or not rest else f"{name}_{rest}"

    def _of(self, keys: list[_Key]) -> str:
        names = ", ".join(dict.fromkeys(self._naming.roles[role] for _, role in keys))
        experts = [expert for expert, _ in keys if expert is not None]
        return f"{names} of {name_experts(experts)}" if experts else names

    def _in(self, keys: list[_Key]) -> str:
        experts = [expert for expert, _ in keys if expert is not None]
        return f" of {name_experts(experts)}" if experts else ""
