"""What a checkpoint says about quantisation, by quant_method. Imports no torch.

Each method that is read has a row in READERS; everything else is refused here, before a tensor is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .compressed_tensors import read_compressed_tensors
from .models import Model
from .modelslim import find_description, read_modelslim
from .quant_config import ADVICE, SUPPORTED, Group, QuantConfig
from .quark import read_quark
from .w8a8_int8 import read_w8a8_int8

READERS: dict[str, Callable[[Mapping[str, Any], Path], QuantConfig]] = {
    "compressed-tensors": read_compressed_tensors,
    "w8a8_int8": read_w8a8_int8,
    "quark": read_quark,
}

DESCRIBED = ("ascend", "modelslim")
"""Values of quant_method that only point to the description file of ModelSlim."""

_KEYS = ("quantization_config", "compression_config")


def read_quantization(config: Mapping[str, Any], file: Path) -> QuantConfig | None:
    """The quantisation of a config.json, or of the description beside it; None when there is none."""
    nested = config.get("text_config")
    places = (config, nested) if isinstance(nested, dict) else (config,)
    quantization = next((place[key] for place in places for key in _KEYS if place.get(key) is not None), None)
    if quantization is not None and not isinstance(quantization, dict):
        raise CheckpointError(f"{file}: quantization_config is {quantization!r}, expected an object")
    method = quantization.get("quant_method") if quantization is not None else None
    if quantization is None or method in DESCRIBED:
        description = find_description(file.parent)
        if description is not None:
            return read_modelslim(description)
        if quantization is None:
            return None
        raise CheckpointError(
            f"{file}: quant_method {method!r} needs quant_model_description.json beside it; fetch that file too"
        )
    reader = READERS.get(method) if isinstance(method, str) else None
    if reader is None:
        details = ", ".join(f"{key} {quantization[key]!r}" for key in _telling(quantization))
        found = f"quant_method {method!r}" + (f" ({details})" if details else "")
        raise CheckpointError(f"{file}: found {found}; supported: {SUPPORTED}; {ADVICE}")
    return reader(quantization, file)


def refuse_unsupported(quantization: QuantConfig, model: Model, file: Path) -> None:
    """Raise when any expert falls into a group that cannot be served; groups of other modules do not matter."""
    if all(group.refusal is None for group in quantization.groups):
        return
    refused: dict[str, Group] = {}
    for layer in model.moe_layers:
        for expert in range(model.moe.num_experts):
            for role in ("gate", "up", "down"):
                group = quantization.group_for(model.family.aliases(layer, expert, role))
                if group is not None and group.refusal is not None:
                    refused.setdefault(group.name, group)
        if len(refused) == len(quantization.groups):
            break
    if refused:
        _refuse(refused.values(), file)


def refuse_all(quantization: QuantConfig, file: Path) -> None:
    """Raise when no group at all can be served: known before the names of the experts are."""
    if quantization.groups and all(group.refusal is not None for group in quantization.groups):
        _refuse(quantization.groups, file)


def _refuse(groups: Iterable[Group], file: Path) -> None:
    found = ", ".join(f"{group.refusal} in {group.name}" for group in groups)
    raise CheckpointError(f"{file}: found {found}; supported: {SUPPORTED}; {ADVICE}")


def _telling(quantization: Mapping[str, Any]) -> list[str]:
    """The fields that describe an unknown method best."""
    names = ("load_in_8bit", "load_in_4bit", "bits", "num_bits", "fmt", "weight_block_size", "quant_type")
    return [name for name in names if isinstance(quantization.get(name), (int, str, list)) and quantization[name]]
