"""Which expert is quantised, and how: what every quantisation method is read into. Imports no torch.

A projection is described by the first group that matches it: groups that name it go before groups that match
it by a pattern, and those before groups that match its class. The ignore list goes before all. A group that
int8moe cannot serve carries the reason; it matters only where it matches an expert.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointError

SUPPORTED = (
    "compressed-tensors int-quantized W8A8 (or the same stored as w8a8_int8, quark or ModelSlim W8A8_DYNAMIC): "
    "symmetric int8 weights with channel or tensor scales, symmetric int8 activations with dynamic scales per token"
)
ADVICE = "quantise the model with the llm-compressor scheme W8A8"

LINEAR = "Linear"

WEIGHTS_ALONE = "weights alone quantised"
"""What the refusal of a group begins with that leaves activations as they are."""


@dataclass(frozen=True)
class Matcher:
    """A list of module names, patterns and class names."""

    names: frozenset[str]
    patterns: tuple[re.Pattern[str], ...] = ()

    @classmethod
    def read(cls, entries: Any, where: str) -> Matcher:
        """Read a list of names and ``re:`` patterns from config.json; None is an empty one."""
        patterns = []
        for entry in expect_strings(entries, where):
            if entry.startswith("re:"):
                try:
                    patterns.append(re.compile(entry[3:]))
                except re.error as error:
                    raise CheckpointError(f"{where}: {entry!r} is not a valid pattern: {error}") from None
        return cls(frozenset(entry for entry in entries or () if not entry.startswith("re:")), tuple(patterns))

    @classmethod
    def linear(cls) -> Matcher:
        """Every Linear module."""
        return cls(frozenset({LINEAR}))

    def rank(self, aliases: tuple[str, ...]) -> int:
        """How well the list matches a Linear module: 3 by name, 2 by a pattern, 1 by its class, 0 not at all."""
        if any(alias in self.names for alias in aliases):
            return 3
        if any(pattern.match(alias) for pattern in self.patterns for alias in aliases):
            return 2
        return 1 if LINEAR in self.names else 0

    def __or__(self, other: Matcher) -> Matcher:
        return Matcher(self.names | other.names, self.patterns + other.patterns)


@dataclass(frozen=True)
class Group:
    """Modules that are quantised in one way.

    Attributes:
        name: for messages: ``config group group_0``.
        targets: the modules.
        strategy: of the weight scales, "channel" or "tensor"; anything else has a refusal.
        refusal: why it cannot be served, in a few words; None when it can.
        quantizes: False where the config leaves these modules unquantised.
    """

    name: str
    targets: Matcher
    strategy: str
    refusal: str | None = None
    quantizes: bool = True

    @property
    def weights_alone(self) -> bool:
        """Whether all that cannot be served is that activations stay as they are (W8A16)."""
        return self.refusal is not None and self.refusal.startswith(WEIGHTS_ALONE)


@dataclass(frozen=True)
class QuantConfig:
    """Decides for each projection whether it is quantised, and in which group.

    Attributes:
        groups: in order of the config.
        ignore: modules that no group applies to.
        description: for people.
    """

    groups: tuple[Group, ...]
    ignore: Matcher
    description: str

    def group_for(self, aliases: tuple[str, ...]) -> Group | None:
        """The group of one projection, known by any of its names; None when it stays unquantised."""
        if self.ignore.rank(aliases):
            return None
        best, best_rank = None, 0
        for group in self.groups:
            rank = group.targets.rank(aliases)
            if rank > best_rank:
                best, best_rank = group, rank
        return best if best is None or best.quantizes else None


def describe(method: str, groups: Iterable[Group]) -> str:
    """``compressed-tensors W8A8 (channel)``."""
    served = {group.strategy for group in groups if group.refusal is None and group.quantizes}
    return f"{method} W8A8 ({'/'.join(sorted(served)) or 'unsupported'})"


def refuse_bits(bits: Any, kind: Any, what: str) -> str | None:
    """What is wrong with ``bits`` of type ``kind`` ("int" or "float") for ``what``; None for int8."""
    if kind != "int":
        return f"float{bits} {what}" if kind == "float" else f"{what} of type {kind!r}"
    return None if bits == 8 else f"{bits} bit {what}"


def expect_object(value: Any, where: str) -> Mapping[str, Any]:
    """A JSON object; None is an empty one."""
    if value is not None and not isinstance(value, dict):
        raise CheckpointError(f"{where}: found {value!r}, expected an object")
    return value or {}


def expect_strings(value: Any, where: str) -> list[str]:
    """A JSON list of strings; None is an empty one."""
    if value is not None and (not isinstance(value, list) or not all(isinstance(entry, str) for entry in value)):
        raise CheckpointError(f"{where}: found {value!r}, expected a list of names and re: patterns")
    return value or []
