"""The quantization_config of compressed-tensors: which expert is quantised, and how. Imports no torch.

A projection is described by the first config group that matches it: groups that name it go before groups
that match it by a pattern, and those before groups that match its class. The ignore list goes before all.
Whether a group can be served is decided by what it says about weights and activations, because group-wise
and asymmetric checkpoints carry the same ``format: int-quantized`` as the ones that int8moe runs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError

SUPPORTED = (
    "compressed-tensors int-quantized W8A8: symmetric int8 weights with channel or tensor scales, "
    "symmetric int8 activations with dynamic scales per token"
)
ADVICE = "quantise the model with the llm-compressor scheme W8A8"

_FORMATS = (None, "int-quantized", "naive-quantized")
_LINEAR = "Linear"


@dataclass(frozen=True)
class Matcher:
    """A list of module names, ``re:`` patterns and class names."""

    names: frozenset[str]
    patterns: tuple[re.Pattern[str], ...]

    @classmethod
    def read(cls, entries: Any, where: str) -> Matcher:
        """Read such a list from config.json; None is an empty one."""
        entries = [] if entries is None else entries
        if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
            raise CheckpointError(f"{where}: found {entries!r}, expected a list of names and re: patterns")
        patterns = []
        for entry in entries:
            if entry.startswith("re:"):
                try:
                    patterns.append(re.compile(entry[3:]))
                except re.error as error:
                    raise CheckpointError(f"{where}: {entry!r} is not a valid pattern: {error}") from None
        return cls(frozenset(entry for entry in entries if not entry.startswith("re:")), tuple(patterns))

    def rank(self, aliases: tuple[str, ...]) -> int:
        """How well the list matches a Linear module: 3 by name, 2 by a pattern, 1 by its class, 0 not at all."""
        if any(alias in self.names for alias in aliases):
            return 3
        if any(pattern.match(alias) for pattern in self.patterns for alias in aliases):
            return 2
        return 1 if _LINEAR in self.names else 0


@dataclass(frozen=True)
class Group:
    """One config group: its targets, the strategy of its weight scales, or why it cannot be served."""

    name: str
    targets: Matcher
    strategy: str
    refusal: str | None


@dataclass(frozen=True)
class QuantConfig:
    """Decides for each projection whether it is quantised, and in which group."""

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
        return best


def read_compressed_tensors(quantization: Mapping[str, Any], file: Path) -> QuantConfig:
    """Read a quantization_config whose quant_method is compressed-tensors."""
    where = f"{file}: quantization_config"
    for key in ("sparsity_config", "transform_config"):
        _expect_object(quantization.get(key), f"{where}.{key}")
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise CheckpointError(f"{where} has no config_groups; supported: {SUPPORTED}")
    whole = _whole_model_refusal(quantization)
    read = []
    for name, group in groups.items():
        group = _expect_object(group, f"{where}.config_groups.{name}")
        for key in ("weights", "input_activations"):
            _expect_object(group.get(key), f"{where}.config_groups.{name}.{key}")
        if group.get("weights") is None:
            continue  # the group concerns other things than weights
        targets = Matcher.read(group.get("targets"), f"{where}.config_groups.{name}.targets")
        refusal = whole or _refusal(group, group["weights"], quantization.get("format"))
        read.append(Group(name, targets, _strategy(group["weights"]), refusal))
    strategies = "/".join(sorted({group.strategy for group in read if group.refusal is None})) or "unsupported"
    ignore = Matcher.read(quantization.get("ignore"), f"{where}.ignore")
    return QuantConfig(tuple(read), ignore, f"compressed-tensors W8A8 ({strategies})")


def _whole_model_refusal(quantization: Mapping[str, Any]) -> str | None:
    sparsity = quantization.get("sparsity_config") or {}
    if sparsity.get("format") not in (None, "dense"):
        return f"sparse weights (sparsity_config format {sparsity['format']!r})"
    if (quantization.get("transform_config") or {}).get("config_groups"):
        return "transformed weights (transform_config)"
    return None


def _refusal(group: Mapping[str, Any], weights: Mapping[str, Any], outer_format: Any) -> str | None:
    """What int8moe cannot serve about a group, in a few words; None when it can serve it."""
    stored = group.get("format") or outer_format
    bits, kind, strategy = weights.get("num_bits", 8), weights.get("type", "int"), _strategy(weights)
    if kind != "int":
        return f"float{bits} weights" if kind == "float" else f"weights of type {kind!r}"
    if bits != 8:
        return f"{bits} bit weights"
    if strategy not in ("channel", "tensor"):
        size = weights.get("group_size") or weights.get("block_structure")
        return f"{strategy} weight scales" + (f" (size {size})" if size else "")
    if weights.get("symmetric", True) is not True:
        return "asymmetric weights (zero points)"
    if weights.get("dynamic", False) is not False:
        return "dynamic weight scales"
    if stored not in _FORMATS:
        return f"format {stored!r}"
    if group.get("output_activations") is not None:
        return "quantised output activations"
    if group.get("input_activations") is None:
        return "weights alone quantised (no input_activations)"
    return _activation_refusal(group["input_activations"])


def _activation_refusal(activations: Mapping[str, Any]) -> str | None:
    bits, kind = activations.get("num_bits", 8), activations.get("type", "int")
    if kind != "int":
        return f"float{bits} activations" if kind == "float" else f"activations of type {kind!r}"
    if bits != 8:
        return f"{bits} bit activations"
    if activations.get("dynamic", False) is not True:
        return "static activation scales"
    if activations.get("symmetric", True) is not True:
        return "asymmetric activations"
    if activations.get("strategy") not in (None, "token"):
        return f"dynamic activation scales per {activations['strategy']}"
    return None


def _strategy(weights: Mapping[str, Any]) -> str:
    """The strategy, inferred as compressed-tensors does where it is not written."""
    if weights.get("strategy") is not None:
        return str(weights["strategy"]).lower()
    size = weights.get("group_size")
    if size is None:
        return "block" if weights.get("block_structure") else "tensor"
    return "channel" if size == -1 else "group"


def _expect_object(value: Any, where: str) -> Mapping[str, Any]:
    if value is not None and not isinstance(value, dict):
        raise CheckpointError(f"{where}: found {value!r}, expected an object")
    return value or {}
