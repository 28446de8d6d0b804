"""The one functional operator, ``torch.ops.int8moe.fused_experts``, for every kernel.

It takes tensors, strings and numbers only: an opaque handle would recompile per layer and die in a reloaded
export. The kernel is bound again by its name, and refuses weights of another layout tag.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .contracts import MoEConfig
from .errors import Int8MoEError, WeightLayoutError
from .weights import ExpertWeights

_SCHEMA = (
    "fused_experts(Tensor hidden_states, Tensor topk_weights, Tensor topk_ids, "
    "Tensor w13_weight, Tensor w13_weight_scale, Tensor? w13_bias, "
    "Tensor w2_weight, Tensor w2_weight_scale, Tensor? w2_bias, Tensor? expert_map, "
    "Tensor[] aux, str[] aux_names, str kernel, str layout, str activation, "
    "int num_experts, int top_k, int hidden_size, int intermediate_size, int local_experts, "
    "bool apply_router_weight_on_input, float swiglu_alpha, float swiglu_limit) -> Tensor"
)

INFERENCE_ONLY = (
    "int8moe is for inference: there is no backward. Run it under torch.inference_mode() or torch.no_grad(), "
    "or detach the inputs"
)

_library = torch.library.Library("int8moe", "DEF")
_library.define(_SCHEMA)


@lru_cache(maxsize=256)
def _config(
    activation: Any,
    num_experts: int,
    top_k: int,
    hidden_size: int,
    intermediate_size: int,
    local_experts: int,
    has_bias: bool,
    has_expert_map: bool,
    apply_router_weight_on_input: bool,
    swiglu_alpha: float,
    swiglu_limit: float,
) -> MoEConfig:
    return MoEConfig(
        activation=activation,
        num_experts=num_experts,
        top_k=top_k,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_local_experts=local_experts,
        has_bias=has_bias,
        has_expert_map=has_expert_map,
        apply_router_weight_on_input=apply_router_weight_on_input,
        swiglu_alpha=swiglu_alpha,
        swiglu_limit=swiglu_limit,
    )


def op_arguments(layer: ExpertWeights, kernel: str) -> tuple[Any, ...]:
    """The plain values of a packed layer that follow its tensors in the operator's schema."""
    config = layer.config
    return (
        kernel,
        "" if layer.layout is None else layer.layout.tag,
        config.activation,
        config.num_experts,
        config.top_k,
        config.hidden_size,
        config.intermediate_size,
        config.local_experts,
        config.apply_router_weight_on_input,
        config.swiglu_alpha,
        config.swiglu_limit,
    )


def _fused_experts(
    hidden_states: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    w13_weight: Tensor,
    w13_weight_scale: Tensor,
    w13_bias: Tensor | None,
    w2_weight: Tensor,
    w2_weight_scale: Tensor,
    w2_bias: Tensor | None,
    expert_map: Tensor | None,
    aux: list[Tensor],
    aux_names: list[str],
    kernel: str,
    layout: str,
    activation: str,
    num_experts: int,
    top_k: int,
    hidden_size: int,
    intermediate_size: int,
    local_experts: int,
    apply_router_weight_on_input: bool,
    swiglu_alpha: float,
    swiglu_limit: float,
) -> Tensor:
    from .binding import bind

    bound = bind(kernel)
    if bound.layout is not None and bound.layout.tag != layout:
        raise WeightLayoutError(
            f"kernel {kernel} reads weights packed as {bound.layout.tag}, these are {layout or 'not packed'}; "
            "pack them with this kernel"
        )
    config = _config(
        activation,
        num_experts,
        top_k,
        hidden_size,
        intermediate_size,
        local_experts,
        w13_bias is not None,
        expert_map is not None,
        apply_router_weight_on_input,
        swiglu_alpha,
        swiglu_limit,
    )
    layer = ExpertWeights(config, expert_map=expert_map, device=hidden_states.device)
    parameters = {
        "w13_weight": w13_weight,
        "w13_weight_scale": w13_weight_scale,
        "w13_bias": w13_bias,
        "w2_weight": w2_weight,
        "w2_weight_scale": w2_weight_scale,
        "w2_bias": w2_bias,
    }
    layer.adopt_packed(parameters, dict(zip(aux_names, aux, strict=True)), bound.layout)
    out = torch.empty(hidden_states.shape, dtype=hidden_states.dtype, device=hidden_states.device)
    bound.apply(layer, hidden_states, topk_weights, topk_ids, out)
    return out


def _fake(hidden_states: Tensor, *_: Any) -> Tensor:
    return torch.empty(hidden_states.shape, dtype=hidden_states.dtype, device=hidden_states.device)


def _backward(ctx: Any, grad: Tensor) -> None:
    raise Int8MoEError(INFERENCE_ONLY)


_library.impl("fused_experts", _fused_experts, "CompositeExplicitAutograd")
torch.library.register_fake("int8moe::fused_experts", _fake, lib=_library)
torch.library.register_autograd("int8moe::fused_experts", _backward, lib=_library)

fused_experts = torch.ops.int8moe.fused_experts.default
