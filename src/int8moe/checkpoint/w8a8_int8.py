"""``quant_method: w8a8_int8``: every Linear has int8 weights with one scale a row. Imports no torch.

The method fixes the rest (symmetric, dynamic activations per token), so its quantization_config says little;
what it does say has to agree.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .quant_config import Group, Matcher, QuantConfig, describe, expect_strings

_BITS = ("bits", "num_bits", "w_bit")


def read_w8a8_int8(quantization: Mapping[str, Any], file: Path) -> QuantConfig:
    """Read a quantization_config whose quant_method is w8a8_int8."""
    where = f"{file}: quantization_config"
    group = Group("quant_method w8a8_int8", Matcher.linear(), "channel", _refusal(quantization))
    ignore = Matcher.read(quantization.get("ignore"), f"{where}.ignore")
    # Unlike ignore, this list may name a parent module, or the last words of a name.
    parts = expect_strings(quantization.get("modules_to_not_convert"), f"{where}.modules_to_not_convert")
    within = Matcher(frozenset(), tuple(re.compile(rf"(.*\.)?{re.escape(part)}(\..*)?$") for part in parts))
    return QuantConfig((group,), ignore | within, describe("w8a8_int8", [group]))


def _refusal(quantization: Mapping[str, Any]) -> str | None:
    for key in _BITS:
        if quantization.get(key) not in (None, 8):
            return f"{quantization[key]} bit weights"
    if size := quantization.get("weight_block_size"):
        return f"block weight scales (size {size})"
    if quantization.get("group_size") not in (None, -1, 0):
        return f"group weight scales (size {quantization['group_size']})"
    if quantization.get("activation_scheme") not in (None, "dynamic"):
        return f"{quantization['activation_scheme']} activation scales"
    if quantization.get("symmetric", True) not in (None, True):
        return "asymmetric weights (zero points)"
    return None
