"""What a config.json says about the routed experts, read by its row of the table of names. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..contracts import Activation, MoEConfig
from ..errors import CheckpointError, ConfigError
from .families import FAMILIES, Family

__all__ = ["ACTIVATIONS", "FAMILIES", "MAX_EXPERTS", "Family", "Model", "Routing", "find_family", "read_model"]

MAX_EXPERTS = 1 << 20
"""More experts than that in all layers together is taken for a damaged config.json."""

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""config.json's ``hidden_act`` -> MoEConfig.activation."""


@dataclass(frozen=True)
class Routing:
    """How the model turns router logits into weights.

    Attributes:
        scoring: "softmax" or "sigmoid".
        renormalize: the chosen scores are divided by their sum.
        num_groups: groups of experts of which ``topk_groups`` are kept before experts are chosen; 1 = none.
        topk_groups: see there.
        scaling_factor: applied to the weights at the end.
    """

    scoring: str
    renormalize: bool
    num_groups: int = 1
    topk_groups: int = 1
    scaling_factor: float = 1.0


class Model(NamedTuple):
    """What config.json says about the routed experts."""

    family: Family
    moe: MoEConfig
    num_hidden_layers: int
    moe_layers: tuple[int, ...]
    routing: Routing
    fields: Mapping[str, str]
    """MoEConfig field -> where it came from, for messages."""


def find_family(config: Mapping[str, Any], file: Path) -> Family | None:
    """The row of a config.json; None for a model_type that is not in the table."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        found = "no model_type" if model_type is None else f"model_type {model_type!r}"
        raise CheckpointError(f"{file}: {found}; expected a name such as {', '.join(sorted(FAMILIES))}")
    return FAMILIES.get(model_type)


def read_model(config: Mapping[str, Any], family: Family, file: Path) -> Model:
    """Read the fields of a config.json; CheckpointError names what does not fit."""
    fields = {
        "num_experts": present(config, family.num_experts),
        "top_k": present(config, family.top_k),
        "hidden_size": "hidden_size",
        "intermediate_size": present(config, family.intermediate_size),
    }
    sizes = {name: positive(config, source, file) for name, source in fields.items()}
    num_layers = positive(config, "num_hidden_layers", file)
    refuse_absurd(sizes, num_layers, fields, file)
    moe = moe_config(config, family, sizes, file)
    layers = family.moe_layers(config, num_layers, file)
    if not layers:
        raise CheckpointError(f"{file}: none of the {num_layers} layers is a mixture of experts")
    return Model(family, moe, num_layers, layers, read_routing(config, family, file), fields)


def refuse_absurd(sizes: Mapping[str, int], num_layers: int, fields: Mapping[str, str], file: Path) -> None:
    """Raise for numbers that no model has, before anything is looped over."""
    if sizes["num_experts"] * num_layers > MAX_EXPERTS:
        raise CheckpointError(
            f"{file}: {fields['num_experts']} {sizes['num_experts']} in num_hidden_layers {num_layers} is more than "
            f"{MAX_EXPERTS} experts; the file is damaged"
        )
    if sizes["top_k"] > sizes["num_experts"]:
        raise CheckpointError(
            f"{file}: {fields['top_k']} {sizes['top_k']} exceeds {fields['num_experts']} {sizes['num_experts']}"
        )


def moe_config(config: Mapping[str, Any], family: Family, sizes: Mapping[str, Any], file: Path) -> MoEConfig:
    """The MoEConfig of every layer."""
    more: dict[str, Any] = {"activation": family.fixed_activation}
    if family.fixed_activation is None:
        source = present(config, family.activation)
        act = config.get(source)
        if not isinstance(act, str) or act not in ACTIVATIONS:
            raise CheckpointError(f"{file}: {source} {act!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
        more["activation"] = ACTIVATIONS[act]
    else:
        stated = (name for name in ("swiglu_alpha", "swiglu_limit") if config.get(name) is not None)
        more |= {name: _number(config, name, 0.0, file) for name in stated}
    try:
        return MoEConfig(**sizes, **more, has_bias=family.has_bias)
    except ConfigError as error:
        raise CheckpointError(f"{file}: {error}") from None


def read_routing(config: Mapping[str, Any], family: Family, file: Path) -> Routing:
    """How the model routes."""
    renormalize = family.renormalize
    if isinstance(renormalize, str):
        renormalize = switch(config, renormalize, family.renormalize_default, file)
    if not family.grouped or config.get("topk_method") == "greedy":
        scaling = _number(config, "routed_scaling_factor", 1.0, file) if family.grouped else 1.0
        return Routing(family.scoring, renormalize, scaling_factor=scaling)
    groups, kept = (
        positive(config, name, file) if config.get(name) is not None else 1 for name in ("n_group", "topk_group")
    )
    return Routing(family.scoring, renormalize, groups, kept, _number(config, "routed_scaling_factor", 1.0, file))


def present(config: Mapping[str, Any], names: tuple[str, ...]) -> str:
    """The first of the fields that config.json has; else the first."""
    return next((name for name in names if config.get(name) is not None), names[0])


def positive(config: Mapping[str, Any], name: str, file: Path) -> int:
    """A number of at least 1."""
    value = config.get(name)
    if type(value) is not int or value < 1:
        found = "has no" if value is None else f"has {value!r} for"
        raise CheckpointError(f"{file}: {found} {name}; expected a number of at least 1")
    return value


def switch(config: Mapping[str, Any], name: str, default: bool, file: Path) -> bool:
    """True or false."""
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise CheckpointError(f"{file}: has {value!r} for {name}; expected true or false")
    return value


def _number(config: Mapping[str, Any], name: str, default: float, file: Path) -> float:
    value = config.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise CheckpointError(f"{file}: has {value!r} for {name}; expected a finite number")
    return float(value)
