"""The one table of model names: how each model_type spells its config fields and its tensors. No torch.

A new model is a new row of FAMILIES. A tensor's name is read as layer, expert, role and suffix; the roles
are "gate", "up", "down", and "gate_up" where one tensor holds both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from ..contracts import Activation, MoEConfig
from ..errors import CheckpointError, ConfigError

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

_NUMBER = "(0|[1-9][0-9]{0,6})"
_LAYER = re.compile(r"(?:^|\.)layers\." + _NUMBER + r"\.")
_EXPERTS = re.compile(r"(?:^|\.)experts(?:\.|$)")


class Slot(NamedTuple):
    """What a tensor's name says; ``expert`` is None where one tensor holds all experts of a layer."""

    layer: int
    expert: int | None
    role: str
    suffix: str


@dataclass(frozen=True, eq=False)
class Naming:
    """One spelling of the tensors of a layer's experts.

    Attributes:
        module: name of the experts module, with ``{layer}``.
        roles: role -> name of the projection.
        fused: one 3-D tensor ``[experts, out, in]`` per projection instead of one module per expert.
    """

    module: str
    roles: Mapping[str, str]
    fused: bool = False

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        module = re.escape(self.module).replace(re.escape("{layer}"), _NUMBER)
        names = "|".join(map(re.escape, self.roles.values()))
        if self.fused:
            return re.compile(rf"{module}\.()({names})((?:_[a-z_]+)?)")
        return re.compile(rf"{module}\.{_NUMBER}\.({names})\.(.+)")

    @cached_property
    def _role_of(self) -> dict[str, str]:
        return {name: role for role, name in self.roles.items()}

    def parse(self, name: str) -> Slot | None:
        """Read a tensor's name; None when it is not spelt this way."""
        match = self._pattern.fullmatch(name)
        if match is None:
            return None
        layer, expert, projection, suffix = match.groups()
        if self.fused:
            return Slot(int(layer), None, self._role_of[projection], f"weight{suffix}")
        return Slot(int(layer), int(expert), self._role_of[projection], suffix)

    def linear(self, layer: int, expert: int, role: str) -> str:
        """Name of the module that holds one projection of one expert, as quantisation configs name it."""
        return f"{self.module.format(layer=layer)}.{expert}.{self.roles[role]}"


@dataclass(frozen=True)
class Family:
    """How one model_type is written down.

    Attributes:
        model_type: as config.json has it.
        experts: module name that transformers gives the experts of a layer, with ``{layer}``.
        namings: every spelling of the tensors on disk.
        router: name of the router's weight, with ``{layer}``.
        num_experts: config fields, the first one present counts; likewise the next three.
        top_k: slots per token.
        intermediate_size: width of one expert.
        activation: hidden_act.
        scoring: how router logits become weights.
        renormalize: config field, or the model's fixed habit.
        renormalize_default: where the field is absent.
        sparse_fields: which of the fields that :meth:`moe_layers` reads this model knows.
    """

    model_type: str
    experts: str
    namings: tuple[Naming, ...]
    router: str
    num_experts: tuple[str, ...] = ("num_experts", "num_local_experts")
    top_k: tuple[str, ...] = ("num_experts_per_tok",)
    intermediate_size: tuple[str, ...] = ("moe_intermediate_size",)
    activation: tuple[str, ...] = ("hidden_act",)
    scoring: str = "softmax"
    renormalize: str | bool = True
    renormalize_default: bool = False
    sparse_fields: tuple[str, ...] = ()

    def moe_layers(self, config: Mapping[str, Any], num_layers: int, file: Path) -> tuple[int, ...]:
        """The layers that have routed experts."""
        known = {name: config[name] for name in self.sparse_fields if config.get(name) is not None}
        dense, step = known.get("mlp_only_layers", []), known.get("decoder_sparse_step", 1)
        numbers = isinstance(dense, list) and all(type(layer) is int and layer >= 0 for layer in dense)
        if not numbers or type(step) is not int or step < 1:
            raise CheckpointError(
                f"{file}: found mlp_only_layers {dense!r}, decoder_sparse_step {step!r}; "
                "expected a list of layer numbers and a number of at least 1"
            )
        return tuple(layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0)

    def aliases(self, layer: int, expert: int, role: str) -> tuple[str, ...]:
        """Every name by which a quantisation config may mean one projection of one expert."""
        named = [naming.linear(layer, expert, role) for naming in self.namings if not naming.fused]
        return tuple(dict.fromkeys((*named, f"{self.experts.format(layer=layer)}.{expert}.{role}_proj")))

    def parse(self, name: str) -> tuple[Naming, Slot] | None:
        """Read a tensor's name in any of the spellings."""
        for naming in self.namings:
            if slot := naming.parse(name):
                return naming, slot
        return None


_PROJ = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_FUSED = {"gate_up": "gate_up_proj", "down": "down_proj"}
_W123 = {"gate": "w1", "up": "w3", "down": "w2"}
_MLP_EXPERTS = "model.layers.{layer}.mlp.experts"
_MLP_NAMINGS = (Naming(_MLP_EXPERTS, _PROJ), Naming(_MLP_EXPERTS, _FUSED, fused=True))
_BLOCK_SPARSE = "model.layers.{layer}.block_sparse_moe.experts"

FAMILIES = {
    family.model_type: family
    for family in (
        Family(
            model_type="qwen3_moe",
            experts=_MLP_EXPERTS,
            namings=_MLP_NAMINGS,
            router="model.layers.{layer}.mlp.gate.weight",
            renormalize="norm_topk_prob",
            sparse_fields=("mlp_only_layers", "decoder_sparse_step"),
        ),
        Family(
            model_type="qwen2_moe",
            experts=_MLP_EXPERTS,
            namings=_MLP_NAMINGS,
            router="model.layers.{layer}.mlp.gate.weight",
            renormalize="norm_topk_prob",
            sparse_fields=("mlp_only_layers", "decoder_sparse_step"),
        ),
        Family(
            model_type="mixtral",
            experts=_MLP_EXPERTS,
            namings=(Naming(_BLOCK_SPARSE, _W123), Naming(_BLOCK_SPARSE, _PROJ)),
            router="model.layers.{layer}.block_sparse_moe.gate.weight",
            num_experts=("num_local_experts",),
            intermediate_size=("intermediate_size",),
        ),
    )
}


class Model(NamedTuple):
    """What config.json says about the routed experts."""

    family: Family
    moe: MoEConfig
    num_hidden_layers: int
    moe_layers: tuple[int, ...]
    renormalize: bool
    fields: Mapping[str, str]
    """MoEConfig field -> config.json field that it came from."""


def read_model(config: Mapping[str, Any], file: Path) -> Model:
    """Find the row of a config.json and read its fields; CheckpointError names what does not fit."""
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        found = "no model_type" if model_type is None else f"model_type {model_type!r} is not supported yet"
        raise CheckpointError(f"{file}: {found}; supported: {', '.join(sorted(FAMILIES))}")
    fields = {
        "num_experts": _present(config, family.num_experts),
        "top_k": _present(config, family.top_k),
        "hidden_size": "hidden_size",
        "intermediate_size": _present(config, family.intermediate_size),
    }
    sizes: dict[str, Any] = {name: _positive(config, source, file) for name, source in fields.items()}
    num_layers = _positive(config, "num_hidden_layers", file)
    if sizes["num_experts"] * num_layers > MAX_EXPERTS:
        raise CheckpointError(
            f"{file}: {fields['num_experts']} {sizes['num_experts']} in num_hidden_layers {num_layers} is more than "
            f"{MAX_EXPERTS} experts; the file is damaged"
        )
    if sizes["top_k"] > sizes["num_experts"]:
        raise CheckpointError(
            f"{file}: {fields['top_k']} {sizes['top_k']} exceeds {fields['num_experts']} {sizes['num_experts']}"
        )
    act = config.get(_present(config, family.activation))
    if not isinstance(act, str) or act not in ACTIVATIONS:
        raise CheckpointError(f"{file}: hidden_act {act!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    try:
        moe = MoEConfig(**sizes, activation=ACTIVATIONS[act])
    except ConfigError as error:
        raise CheckpointError(f"{file}: {error}") from None
    renormalize = family.renormalize
    if isinstance(renormalize, str):
        renormalize = _switch(config, renormalize, family.renormalize_default, file)
    layers = family.moe_layers(config, num_layers, file)
    if not layers:
        raise CheckpointError(f"{file}: none of the {num_layers} layers is a mixture of experts")
    return Model(family, moe, num_layers, layers, renormalize, fields)


def experts_layer(name: str) -> int | None:
    """The layer whose routed experts a tensor belongs to by the look of its name; -1 = no number in it."""
    if _EXPERTS.search(name) is None:
        return None
    match = _LAYER.search(name)
    return int(match[1]) if match else -1


def _present(config: Mapping[str, Any], names: tuple[str, ...]) -> str:
    return next((name for name in names if config.get(name) is not None), names[0])


def _positive(config: Mapping[str, Any], name: str, file: Path) -> int:
    value = config.get(name)
    if type(value) is not int or value < 1:
        found = "has no" if value is None else f"has {value!r} for"
        raise CheckpointError(f"{file}: {found} {name}; expected a number of at least 1")
    return value


def _switch(config: Mapping[str, Any], name: str, default: bool, file: Path) -> bool:
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise CheckpointError(f"{file}: has {value!r} for {name}; expected true or false")
    return value
