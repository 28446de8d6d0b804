"""Whether the modules of a model compute what takes their place: looked at before a tensor is read."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...checkpoint import CheckpointPlan, LayerPlan
from ...checkpoint.unknown_model import TOP_K
from ...errors import ConfigError
from .experts_function import module_config


def as_configured(plan: CheckpointPlan, model: Any) -> CheckpointPlan:
    """The plan with as many experts a token as the model's config says, which from_pretrained may have changed.

    Raises:
        ConfigError: there are not so many experts.
    """
    config = model.config.get_text_config()
    name = next((name for name in TOP_K if getattr(config, name, None) is not None), None)
    if name is None:
        return plan
    top_k = getattr(config, name)
    layers = []
    for layer in plan.layers:
        most = layer.config.num_experts
        if type(top_k) is not int or not 1 <= top_k <= most:
            raise ConfigError(f"{plan.path}: {name} is {top_k!r}; allowed are 1 to {most}, the experts of {layer.key}")
        layers.append(dataclasses.replace(layer, config=layer.config.model_copy(update={"top_k": top_k})))
    return dataclasses.replace(plan, layers=tuple(layers))


def check_module(module: Any, layer: LayerPlan, path: Path) -> None:
    """Hold an experts module of transformers against what the files say that it computes.

    Modules whose experts transformers cannot exchange do not say what they compute, and pass.

    Raises:
        ConfigError: a gate, an activation or a size is another one: the model's config was changed, or nobody knows it.
    """
    if not hasattr(module, "has_gate"):
        return
    found = module_config(module, layer.config.top_k)
    for name, value in found:
        wanted = getattr(layer.config, name)
        if value != wanted:
            raise ConfigError(
                f"{path}: {layer.key} has {name} {value} in this {type(module).__name__}, and {wanted} by the files "
                "and config.json; leave what changes it out of the config and of from_pretrained"
            )


class _Stand(nn.Module):
    """In place of a linear: it multiplies, so that what a module does can be computed on a few numbers."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def is_plain_gated_mlp(module: Any, parts: Sequence[str]) -> bool:
    """Whether a module computes ``down(act_fn(gate(x)) * up(x))`` and nothing else.

    Args:
        module: with linears of these names and ``act_fn``; it may be on the meta device, and is left as it is.
        parts: names of gate, up and down.
    """
    with torch.device("cpu"), torch.no_grad():
        gate, up, down = stands = [_Stand(factor) for factor in (1.5, 0.75, -2.0)]
        trial = copy.copy(module)
        object.__setattr__(trial, "_modules", {**module._modules, **dict(zip(parts, stands, strict=True))})
        x = torch.linspace(-12.0, 12.0, 25).reshape(1, 25)
        try:
            found = trial(x)
            wanted = down(trial.act_fn(gate(x)) * up(x))
            return isinstance(found, Tensor) and torch.equal(found, wanted)
        except Exception:  # it needs more than its linears and act_fn: whatever it computes, it is something else
            return False
