"""What a config.json says about quantisation, by quant_method. Imports no torch.

Each method that is read has a row in READERS; everything else is refused here, before a tensor is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .compressed_tensors import ADVICE, SUPPORTED, Group, QuantConfig, read_compressed_tensors
from .models import Model

READERS: dict[str, Callable[[Mapping[str, Any], Path], QuantConfig]] = {
    "compressed-tensors": read_compressed_tensors,
}

_KEYS = ("quantization_config", "compression_config")


def read_quantization(config: Mapping[str, Any], file: Path) -> QuantConfig | None:
    """The quantisation of a config.json; None when it has none."""
    quantization = next((config[key] for key in _KEYS if config.get(key) is not None), None)
    if quantization is None:
        return None
    if not isinstance(quantization, dict):
        raise CheckpointError(f"{file}: quantization_config is {quantization!r}, expected an object")
    method = quantization.get("quant_method")
    reader = READERS.get(method) if isinstance(method, str) else None
    if reader is None:
        details = ", ".join(f"{key} {quantization[key]!r}" for key in _telling(quantization))
        found = f"quant_method {method!r}" + (f" ({details})" if details else "")
        raise CheckpointError(f"{file}: found {found}; supported: {SUPPORTED}; {ADVICE}")
    return reader(quantization, file)


def refuse_unsupported(quantization: QuantConfig, model: Model, file: Path) -> None:
    """Raise when any expert falls into a config group that cannot be served; groups of other modules do not matter."""
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
        found = ", ".join(f"{group.refusal} in config group {name}" for name, group in refused.items())
        raise CheckpointError(f"{file}: found {found}; supported: {SUPPORTED}; {ADVICE}")


def _telling(quantization: Mapping[str, Any]) -> list[str]:
    """The fields that describe an unknown method best."""
    names = ("load_in_8bit", "load_in_4bit", "bits", "num_bits", "fmt", "weight_block_size", "quant_type")
    return [name for name in names if isinstance(quantization.get(name), (int, str, list)) and quantization[name]]
