"""The one functional operator, ``torch.ops.int8moe.fused_experts``, for every kernel.

It takes tensors, strings and numbers only: an opaque handle would recompile per layer and die in a reloaded
export. The kernel is bound again by its name, and refuses weights of another layout tag.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .contracts import HIDDEN_DTYPES, MoEConfig
from .errors import Int8MoEError, UnsupportedInputError, WeightLayoutError
from .parameters import SCALES_AND_BIASES, WEIGHTS
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
    _check_shapes(hidden_states, topk_weights, topk_ids, config)
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
    _check_weights(layer, bound.packed_expert_nbytes)
    out = torch.empty(hidden_states.shape, dtype=hidden_states.dtype, device=hidden_states.device)
    bound.apply(layer, hidden_states.resolve_neg(), topk_weights.resolve_neg(), topk_ids, out)
    return out


def _check_shapes(hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor, config: MoEConfig) -> None:
    """A kernel trusts shapes: whoever calls the operator without a layer must not reach it with wrong ones."""
    slots = (hidden_states.shape[0], config.top_k) if hidden_states.dim() else ()
    for name, tensor, shape, dtypes in (
        ("hidden_states", hidden_states, (*slots[:1], config.hidden_size), HIDDEN_DTYPES),
        ("topk_weights", topk_weights, slots, (*HIDDEN_DTYPES, "float64")),
        ("topk_ids", topk_ids, slots, ("int32", "int64")),
    ):
        if tuple(tensor.shape) != shape or str(tensor.dtype).removeprefix("torch.") not in dtypes:
            raise UnsupportedInputError(
                f"fused_experts: {name} is {tensor.dtype} {list(tensor.shape)}; wanted is {list(shape)}, "
                f"{' or '.join(dtypes)}"
            )


def _check_weights(layer: ExpertWeights, packed_expert_nbytes: Any) -> None:
    config = layer.config
    experts = config.local_experts
    packed = packed_expert_nbytes(config) if packed_expert_nbytes is not None else ()
    for name, size in zip(WEIGHTS, packed, strict=False):
        if layer.expert_bytes(name).numel() < experts * size:
            raise WeightLayoutError(f"fused_experts: {name} is smaller than {experts} experts of {size} packed bytes")
    widths = {"w13": config.w13_rows, "w2": config.hidden_size}
    for name in SCALES_AND_BIASES:
        tensor: Tensor | None = getattr(layer, name)
        if tensor is not None and (
            tuple(tensor.shape) != (experts, widths[name.partition("_")[0]]) or tensor.dtype != torch.float32
        ):
            raise WeightLayoutError(f"fused_experts: {name} is {tensor.dtype} {list(tensor.shape)}, not of this layer")
    if layer.expert_map is not None and tuple(layer.expert_map.shape) != (config.num_experts,):
        raise WeightLayoutError(
            f"fused_experts: expert_map is {list(layer.expert_map.shape)}, not [{config.num_experts}]"
        )


def _fake(hidden_states: Tensor, *_: Any) -> Tensor:
    return torch.empty(hidden_states.shape, dtype=hidden_states.dtype, device=hidden_states.device)


def _backward(ctx: Any, grad: Tensor) -> None:
    raise Int8MoEError(INFERENCE_ONLY)


_library.impl("fused_experts", _fused_experts, "CompositeExplicitAutograd")
torch.library.register_fake("int8moe::fused_experts", _fake, lib=_library)
torch.library.register_autograd("int8moe::fused_experts", _backward, lib=_library)

fused_experts = torch.ops.int8moe.fused_experts.default
