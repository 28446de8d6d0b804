"""The quantization_config of compressed-tensors. Imports no torch.

Whether a group can be served is decided by what it says about weights and activations, because group-wise
and asymmetric checkpoints carry the same ``format: int-quantized`` as the ones that int8moe runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .quant_config import SUPPORTED, WEIGHTS_ALONE, Group, Matcher, QuantConfig, describe, expect_object, refuse_bits

_FORMATS = (None, "int-quantized", "naive-quantized")


def read_compressed_tensors(quantization: Mapping[str, Any], file: Path) -> QuantConfig:
    """Read a quantization_config whose quant_method is compressed-tensors."""
    where = f"{file}: quantization_config"
    for key in ("sparsity_config", "transform_config"):
        expect_object(quantization.get(key), f"{where}.{key}")
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise CheckpointError(f"{where} has no config_groups; supported: {SUPPORTED}")
    whole = _whole_model_refusal(quantization)
    read = []
    for name, group in groups.items():
        group = expect_object(group, f"{where}.config_groups.{name}")
        for key in ("weights", "input_activations"):
            expect_object(group.get(key), f"{where}.config_groups.{name}.{key}")
        if group.get("weights") is None:
            continue  # the group concerns other things than weights
        targets = Matcher.read(group.get("targets"), f"{where}.config_groups.{name}.targets")
        refusal = whole or _refusal(group, group["weights"], quantization.get("format"))
        read.append(Group(f"config group {name}", targets, _strategy(group["weights"]), refusal))
    ignore = Matcher.read(quantization.get("ignore"), f"{where}.ignore")
    return QuantConfig(tuple(read), ignore, describe("compressed-tensors", read))


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
    strategy = _strategy(weights)
    if wrong := refuse_bits(weights.get("num_bits", 8), weights.get("type", "int"), "weights"):
        return wrong
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
        return f"{WEIGHTS_ALONE} (no input_activations)"
    return _activation_refusal(group["input_activations"])


def _activation_refusal(activations: Mapping[str, Any]) -> str | None:
    if wrong := refuse_bits(activations.get("num_bits", 8), activations.get("type", "int"), "activations"):
        return wrong
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
