"""How the tensors of routed experts are spelt: names read as layer, expert, role and suffix. Imports no torch.

The roles are "gate", "up", "down", and "gate_up" where one tensor holds both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

NUMBER = "(0|[1-9][0-9]{0,6})"
_LAYER = re.compile(r"(?:^|\.)layers\." + NUMBER + r"\.")
_EXPERTS = re.compile(r"(?:^|\.)experts(?:\.|$)")
_DRAFT = re.compile(r"(?:^|\.)(mtp|nextn)[a-z_]*\.")

FUSED_ROLES: Mapping[str, tuple[str, ...]] = {"gate_up": ("gate", "up"), "down": ("down",)}
"""What a tensor of all experts holds."""

_FUSED_SUFFIXES = {
    "": "weight",
    ".weight": "weight",
    "_scale": "weight_scale",
    "_weight_scale": "weight_scale",
    ".weight_scale": "weight_scale",
    "_zero_point": "weight_zero_point",
    ".weight_zero_point": "weight_zero_point",
    ".weight_offset": "weight_offset",
    "_bias": "bias",
    ".bias": "bias",
}
"""What stands after the projection's name in a fused tensor's name -> the suffix of a Linear's tensor."""


_BASE_MODEL = "model."
"""What the names of a whole model begin with, and those of a base model that was saved alone do not."""


def _split_prefix(name: str) -> tuple[str, str]:
    return (_BASE_MODEL, name.removeprefix(_BASE_MODEL)) if name.startswith(_BASE_MODEL) else ("", name)


def with_and_without_prefix(name: str) -> tuple[str, ...]:
    """A name as a whole model has it, and as its base model alone has it."""
    prefix, rest = _split_prefix(name)
    return (name, rest) if prefix else (name,)


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
        transposed: the 3-D tensors are ``[experts, in, out]``.
        interleaved: gate and up rows alternate in a fused "gate_up"; otherwise the gate rows come first.
    """

    module: str
    roles: Mapping[str, str]
    fused: bool = False
    transposed: bool = False
    interleaved: bool = False

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        prefix, rest = _split_prefix(self.module)
        optional = f"(?:{re.escape(prefix)})?" if prefix else ""
        module = optional + re.escape(rest).replace(re.escape("{layer}"), NUMBER)
        names = "|".join(map(re.escape, self.roles.values()))
        if self.fused:
            return re.compile(rf"{module}\.()({names})((?:[._][a-z_]+)?)")
        return re.compile(rf"{module}\.{NUMBER}\.({names})\.(.+)")

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
            return Slot(int(layer), None, self._role_of[projection], _FUSED_SUFFIXES.get(suffix, f"weight{suffix}"))
        return Slot(int(layer), int(expert), self._role_of[projection], suffix)

    def linear(self, layer: int, expert: int | None, role: str) -> str:
        """Name of the module or parameter that holds one projection, as quantisation configs name it."""
        module = self.module.format(layer=layer)
        return f"{module}.{self.roles[role]}" if expert is None else f"{module}.{expert}.{self.roles[role]}"


class Place(NamedTuple):
    """Where a tensor belongs by the look of its name.

    ``draft`` is the module of a multi-token-prediction head that lies outside the model's layers, else "".
    ``layer`` is -1 where the name holds no number.
    """

    draft: str
    layer: int


def outside_model(name: str, num_layers: int) -> bool:
    """Whether a tensor belongs to a multi-token-prediction head: past the model's layers, or in a module of its own."""
    layer = _LAYER.search(name)
    return _DRAFT.search(name) is not None or (layer is not None and int(layer[1]) >= num_layers)


def experts_place(name: str) -> Place | None:
    """Whose routed experts a tensor belongs to; None for all other tensors."""
    if _EXPERTS.search(name) is None:
        return None
    draft, layer = _DRAFT.search(name), _LAYER.search(name)
    if draft is not None:
        return Place(name[: layer.end() - 1] if layer else name[: draft.end() - 1], int(layer[1]) if layer else -1)
    return Place("", int(layer[1]) if layer else -1)
