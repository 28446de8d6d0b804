"""``quant_method: quark``: a spec for the whole model, with others for layer types and named layers. No torch."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .quant_config import (
    LINEAR,
    SUPPORTED,
    WEIGHTS_ALONE,
    Group,
    Matcher,
    QuantConfig,
    describe,
    expect_object,
    expect_strings,
)

_STRATEGIES = {"per_channel": "channel", "per_tensor": "tensor"}
_TOKEN_SCHEMES = ("per_token", "per_channel")  # of dynamic activations: both mean one scale a token
_ROW_AXES = (None, 0, -2)


def read_quark(quantization: Mapping[str, Any], file: Path) -> QuantConfig:
    """Read a quantization_config whose quant_method is quark."""
    where = f"{file}: quantization_config"
    named = expect_object(quantization.get("layer_quant_config"), f"{where}.layer_quant_config")
    typed = expect_object(quantization.get("layer_type_quant_config"), f"{where}.layer_type_quant_config")
    groups = [
        _group(f"layer_quant_config {name}", spec, _wildcards([name], where), where) for name, spec in named.items()
    ]
    groups += [
        _group(f"layer_type_quant_config {name}", spec, Matcher.linear(), where)
        for name, spec in typed.items()
        if LINEAR in name
    ]
    if (whole := quantization.get("global_quant_config")) is not None:
        groups.append(_group("global_quant_config", whole, Matcher.linear(), where))
    if not groups:
        raise CheckpointError(f"{where} has no global_quant_config; supported: {SUPPORTED}")
    ignore = _wildcards(expect_strings(quantization.get("exclude"), f"{where}.exclude"), where)
    return QuantConfig(tuple(groups), ignore, describe("quark", groups))


def _wildcards(entries: list[str], where: str) -> Matcher:
    """Names, ``re:`` patterns, and shell wildcards such as ``*lm_head``."""
    wild = [entry for entry in entries if not entry.startswith("re:") and any(mark in entry for mark in "*?[")]
    patterns = tuple(re.compile(fnmatch.translate(entry)) for entry in wild)
    return Matcher.read([entry for entry in entries if entry not in wild], where) | Matcher(frozenset(), patterns)


def _group(name: str, spec: Any, targets: Matcher, where: str) -> Group:
    spec = expect_object(spec, f"{where}.{name}")
    weight = spec.get("weight")
    if weight is None:
        return Group(name, targets, "none", quantizes=False)
    if isinstance(weight, list):
        return Group(name, targets, "several", "weights quantised in several steps")
    weight = expect_object(weight, f"{where}.{name}.weight")
    strategy = _STRATEGIES.get(str(weight.get("qscheme")), str(weight.get("qscheme")))
    refusal = _weight_refusal(weight, strategy) or _other_refusal(spec, f"{where}.{name}")
    return Group(name, targets, strategy, refusal)


def _weight_refusal(weight: Mapping[str, Any], strategy: str) -> str | None:
    if wrong := _dtype_refusal(weight, "weights"):
        return wrong
    if strategy not in _STRATEGIES.values():
        size = weight.get("group_size") or weight.get("block_size")
        return f"{strategy.removeprefix('per_')} weight scales" + (f" (size {size})" if size else "")
    if strategy == "channel" and weight.get("ch_axis") not in _ROW_AXES:
        return f"weight scales along axis {weight['ch_axis']}"
    if weight.get("symmetric") not in (None, True):
        return "asymmetric weights (zero points)"
    return "dynamic weight scales" if weight.get("is_dynamic") else None


def _other_refusal(spec: Mapping[str, Any], where: str) -> str | None:
    for key, what in (("output_tensors", "quantised output activations"), ("bias", "quantised biases")):
        if spec.get(key) is not None:
            return what
    if spec.get("input_tensors") is None:
        return f"{WEIGHTS_ALONE} (no input_tensors)"
    if isinstance(spec["input_tensors"], list):
        return "activations quantised in several steps"
    activations = expect_object(spec["input_tensors"], f"{where}.input_tensors")
    if wrong := _dtype_refusal(activations, "activations"):
        return wrong
    if activations.get("is_dynamic") is not True:
        return "static activation scales"
    if activations.get("symmetric") not in (None, True):
        return "asymmetric activations"
    if activations.get("qscheme") not in _TOKEN_SCHEMES:
        return f"dynamic activation scales {activations.get('qscheme')}"
    return None


def _dtype_refusal(spec: Mapping[str, Any], what: str) -> str | None:
    dtype = str(spec.get("dtype"))
    if dtype == "int8":
        return None
    if match := re.fullmatch(r"(u?int|fp)([0-9]+)(_.*)?", dtype):
        return f"{match[2]} bit {what} ({dtype})" if "int" in match[1] else f"float{match[2]} {what} ({dtype})"
    return f"{what} of type {dtype!r}"
