"""The quantization_config that is written for a W8A8 checkpoint of ours. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from .experts import FLOATS
from .files import TensorEntry
from .names import experts_place

_SCHEME = {
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    "group_size": None,
    "block_structure": None,
    "actorder": None,
    "observer_kwargs": {},
}


def quantization_config(unquantized: Iterable[TensorEntry], skipped_layers: Iterable[str]) -> dict[str, Any]:
    """compressed-tensors ``int-quantized``, for every Linear but those that stay as they are.

    Args:
        unquantized: tensors that are stored as they were; the Linear modules among them go on the ignore list.
        skipped_layers: names of the layers outside the model, whose experts stay as they are.
    """
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": "int-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "format": "int-quantized",
                "weights": {**_SCHEME, "strategy": "channel", "dynamic": False, "observer": "minmax"},
                "input_activations": {**_SCHEME, "strategy": "token", "dynamic": True, "observer": None},
                "output_activations": None,
            }
        },
        "ignore": _ignored(unquantized, skipped_layers),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _ignored(unquantized: Iterable[TensorEntry], skipped_layers: Iterable[str]) -> list[str]:
    """Names of the Linear modules; lm_head also where it is tied to the embedding, and so not stored."""
    names = {"lm_head"}
    for entry in unquantized:
        module, dot, parameter = entry.name.rpartition(".")
        linear = dot and parameter == "weight" and len(entry.shape) == 2 and entry.dtype in FLOATS
        if linear and not module.endswith("embed_tokens") and experts_place(entry.name) is None:
            names.add(module)
    return [*sorted(names), *(rf"re:{re.escape(layer)}\..*" for layer in sorted(skipped_layers))]
