"""Everything that is wrong with a checkpoint, told at once, in one line. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from ..errors import CheckpointError

_SHOWN_PER_KIND = 8


class Kind:
    """The kinds of faults, as they are printed."""

    DAMAGED = "damaged or missing files"
    INDEX = "the index contradicts the files"
    MISSING = "missing expert tensors"
    LEFTOVER = "expert tensors that would be left over"
    SHAPE = "wrong shapes"
    DTYPE = "wrong dtypes"
    CONFIG = "weights that contradict config.json"
    NOT_INT8 = "floats where quantization_config says int8"
    MIXED = "layers that are quantised in part"
    VALUE = "bad values"


_ADVICE = {
    Kind.DAMAGED: "fetch the checkpoint again",
    Kind.INDEX: "fetch the checkpoint again",
    Kind.MISSING: "fetch the checkpoint again, or quantise it again",
    Kind.LEFTOVER: "a checkpoint is loaded only when every stored expert tensor has a use: quantise it again "
    "with the llm-compressor scheme W8A8",
    Kind.SHAPE: "config.json and weights belong to different models, or the files are damaged",
    Kind.DTYPE: "weights are I8, or BF16, F16, F32 where unquantised; scales are BF16, F16 or F32",
    Kind.CONFIG: "quantise the checkpoint again with the llm-compressor scheme W8A8",
    Kind.NOT_INT8: "take quantization_config out of config.json, or put these experts on its ignore list; then they "
    "are quantised while loading where that is asked for (--quantize, quantize=True)",
    Kind.MIXED: "quantise all experts of a layer, or none",
    Kind.VALUE: "quantise the checkpoint again",
}


class Faults:
    """Collects faults and raises them as one CheckpointError."""

    def __init__(self, where: Path) -> None:
        self._where = where
        self._found: dict[str, list[str]] = {}

    def add(self, kind: str, text: str) -> None:
        """Note one fault."""
        self._found.setdefault(kind, []).append(text.replace("\n", "\\n"))

    def raise_if_any(self) -> None:
        """Raise one error with every kind, the first faults of each, and what to do."""
        if not self._found:
            return
        parts = []
        for kind, texts in self._found.items():
            shown = texts[:_SHOWN_PER_KIND]
            if len(texts) > len(shown):
                shown.append(f"and {len(texts) - len(shown)} more")
            parts.append(f"{kind}: {'; '.join(shown)}")
        advice = "; ".join(dict.fromkeys(_ADVICE[kind] for kind in self._found))
        raise CheckpointError(f"{self._where}: {'. '.join(parts)} ({advice})") from None


_EXPERT = re.compile(r"(.*\bexperts)\.([0-9]{1,7})\.(.*)")


def describe_tensors(names: Iterable[str]) -> str:
    """``"3 tensors: up_proj.weight of experts 2-3 of model.layers.0.mlp.experts, model.norm.weight"``, not all."""
    experts: dict[tuple[str, str], list[int]] = {}
    others = []
    for name in names:
        if match := _EXPERT.fullmatch(name):
            experts.setdefault((match[1], match[3]), []).append(int(match[2]))
        else:
            others.append(name)
    count = sum(map(len, experts.values())) + len(others)
    parts = [f"{name} of {name_experts(of)} of {module}" for (module, name), of in experts.items()]
    parts += others
    if len(parts) > _SHOWN_PER_KIND:
        parts[_SHOWN_PER_KIND:] = ["..."]
    return f"{count} tensor{'' if count == 1 else 's'}: {', '.join(parts)}"


def name_experts(numbers: Iterable[int]) -> str:
    """``[2]`` -> ``"expert 2"``, ``[0, 1, 2, 5]`` -> ``"experts 0-2, 5"``."""
    distinct = set(numbers)
    return f"expert{'' if len(distinct) == 1 else 's'} {number_ranges(distinct)}"


def number_ranges(numbers: Iterable[int]) -> str:
    """``[0, 1, 2, 5]`` -> ``"0-2, 5"``."""
    ranges: list[list[int]] = []
    for number in sorted(set(numbers)):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)
