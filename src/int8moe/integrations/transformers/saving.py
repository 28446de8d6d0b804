"""Writes a model with INT8 experts as compressed-tensors: int8 and fp32 scales ``[N, 1]``, projection by projection."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...checkpoint.families import FAMILIES
from ...checkpoint.names import Naming
from ...errors import CheckpointError
from ...layer import FusedMoE
from .modules import QuantizedExperts, QuantizedLinear, QuantizedMLP

_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}


def quantization_dict(model: nn.Module) -> dict[str, Any]:
    """The quantization_config of a model as it is: all linears but those that stayed floats."""
    modules = dict(model.named_modules())
    floats = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
    floats += [
        f"re:{re.escape(name)}\\..*"
        for name, module in modules.items()
        if name.endswith(".experts") and not isinstance(module, QuantizedExperts)
    ]
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**_INT8, "strategy": "channel", "dynamic": False},
                "input_activations": {**_INT8, "strategy": "token", "dynamic": True},
            }
        },
        # Routers are no linears to transformers, but to other readers.
        "ignore": ["re:.*\\.(gate|router)$", *floats],
    }


def model_state(model: Any, model_type: str) -> dict[str, Tensor]:
    """Every tensor of a model, with the names that its checkpoints have.

    Packed weights are unpacked in a copy, a layer at a time, so that the model can go on serving.
    """
    naming = next((naming for naming in FAMILIES[model_type].namings if not naming.fused), None)
    if naming is None:
        raise CheckpointError(f"no names are known for the single experts of {model_type}")
    state: dict[str, Tensor] = {}
    ours: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, QuantizedExperts):
            assert module.fused is not None
            ours.append(f"{name}.")
            added = module.key.removesuffix(name)  # the base model alone is saved without its prefix
            for key, tensor in _experts_state(module.fused, naming, module.index).items():
                state[key.removeprefix(added)] = tensor
        elif isinstance(module, QuantizedMLP):
            assert module.fused is not None
            ours.append(f"{name}.")
            state.update(_projections(_unpacked(module.fused), 0, f"{name}.{{}}_proj".format))
        elif isinstance(module, QuantizedLinear):
            ours += [f"{name}.weight", f"{name}.weight_scale"]
            state.update(_pair(name, module.weight, module.weight_scale))
    for name, tensor in model.state_dict().items():
        if not name.startswith(tuple(ours)):
            state[name] = tensor
    return state


def _experts_state(fused: FusedMoE, naming: Naming, index: int) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    canonical = _unpacked(fused)
    for expert in range(fused.config.num_experts):
        state.update(_projections(canonical, expert, partial(naming.linear, index, expert)))
    return state


def _unpacked(fused: FusedMoE) -> FusedMoE:
    copied = copy.deepcopy(fused)
    copied.restore_weights()
    return copied


def _projections(canonical: FusedMoE, expert: int, name_of: Callable[[str], str]) -> dict[str, Tensor]:
    """The tensors of one expert of an unpacked layer; ``name_of`` maps a role to the name of its linear."""
    width = canonical.config.intermediate_size
    state: dict[str, Tensor] = {}
    for role, stack, rows in (
        ("gate", "w13", slice(0, width)),
        ("up", "w13", slice(width, 2 * width)),
        ("down", "w2", slice(None)),
    ):
        weight, scale, bias = (getattr(canonical, f"{stack}_{part}") for part in ("weight", "weight_scale", "bias"))
        state.update(_pair(name_of(role), weight[expert, rows], scale[expert, rows]))
        if bias is not None:
            state[f"{name_of(role)}.bias"] = bias[expert, rows].clone()
    return state


def _pair(name: str, weight: Tensor, scale: Tensor) -> dict[str, Tensor]:
    """One projection's tensors, with storage of their own: safetensors writes no views."""
    return {
        f"{name}.weight": weight.to(torch.int8).clone(memory_format=torch.contiguous_format),
        f"{name}.weight_scale": scale.reshape(-1, 1).clone(),
    }
