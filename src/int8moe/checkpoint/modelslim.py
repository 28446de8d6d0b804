"""ModelSlim: a JSON file beside config.json says of every tensor how it is stored. Imports no torch.

``{"model.layers.0.mlp.experts.0.up_proj.weight": "W8A8_DYNAMIC", "lm_head.weight": "FLOAT", ...}``. Only
W8A8_DYNAMIC is served: int8 weights with fp32 scales and (zero) offsets a row, activations quantised per token.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from ..errors import CheckpointError
from .files import read_json
from .quant_config import Group, Matcher, QuantConfig, describe

_FILE = re.compile(r"quant_model_description(_[a-z0-9_]+)?\.json")
_SUFFIX = ".weight"
_UNQUANTISED = "FLOAT"
_SERVED = "W8A8_DYNAMIC"
_KIND = re.compile(r"W([0-9]+)A([0-9]+)(_DYNAMIC)?")


def find_description(directory: Path) -> Path | None:
    """The description beside a config.json, if there is one."""
    if not directory.is_dir():
        return None
    found = sorted(file for file in directory.iterdir() if _FILE.fullmatch(file.name))
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise CheckpointError(f"{directory}: holds {names}; one of them describes the weights: move the others away")
    return found[0] if found else None


def read_modelslim(file: Path) -> QuantConfig:
    """Read a description file."""
    content = read_json(file)
    modules: dict[str, set[str]] = defaultdict(set)
    for name, kind in content.items():
        if name.endswith(_SUFFIX) and isinstance(kind, str):
            modules[kind].add(name.removesuffix(_SUFFIX))
    if not modules:
        raise CheckpointError(
            f"{file}: describes no weight; expected is an object of tensor names, each with {_SERVED} or {_UNQUANTISED}"
        )
    groups = [
        Group(f"kind {kind}", Matcher(frozenset(names)), "channel", _refusal(kind))
        for kind, names in modules.items()
        if kind != _UNQUANTISED
    ]
    return QuantConfig(tuple(groups), Matcher(frozenset()), describe("ModelSlim", groups))


def _refusal(kind: str) -> str | None:
    match = _KIND.fullmatch(kind)
    if match is None:
        return f"weights of kind {kind!r}"
    weights, activations, dynamic = match.groups()
    if weights != "8":
        return f"{weights} bit weights ({kind})"
    if activations != "8":
        return f"{activations} bit activations ({kind})"
    return f"static activation scales ({kind})" if dynamic is None else None
