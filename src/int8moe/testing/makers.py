"""Seeded experts, routing and layers, and the reference's answer to them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import host, reference
from ..contracts import MoEConfig

if TYPE_CHECKING:
    from ..layer import FusedMoE

__all__ = [
    "Experts",
    "make_experts",
    "make_hidden_states",
    "make_layer",
    "make_routing",
    "reference_output",
    "threads",
]


@dataclass(frozen=True)
class Experts:
    """The canonical tensors of one layer, as ``FusedMoE.load_weights`` takes them."""

    w13_weight: Tensor
    w13_weight_scale: Tensor
    w2_weight: Tensor
    w2_weight_scale: Tensor
    w13_bias: Tensor | None = None
    w2_bias: Tensor | None = None

    def tensors(self) -> dict[str, Any]:
        """Return those that exist, by name: keyword arguments of ``load_weights``."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def clone(self) -> Experts:
        """Copy every tensor."""
        return Experts(**{name: tensor.clone() for name, tensor in self.tensors().items()})


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_experts(config: MoEConfig, *, seed: int = 0) -> Experts:
    """Make random experts: weights over the full range [-128, 127], scales that keep values of order one.

    With a map there are ``config.local_experts`` of them.
    """
    g = _generator(seed)
    experts, rows = config.local_experts, config.w13_rows
    hidden, inner = config.hidden_size, config.intermediate_size

    def weight(*shape: int) -> Tensor:
        return torch.randint(-128, 128, shape, generator=g, dtype=torch.int8)

    def scale(count: int, depth: int) -> Tensor:
        # 74 is the standard deviation of a weight; 3 reaches the curved and the flat part of every activation.
        return (0.5 + torch.rand(experts, count, generator=g)) * (3.0 / (74.0 * math.sqrt(depth)))

    w13, w13_scale = weight(experts, rows, hidden), scale(rows, hidden)
    w2, w2_scale = weight(experts, hidden, inner), scale(hidden, inner)
    if not config.has_bias:
        return Experts(w13, w13_scale, w2, w2_scale)
    w13_bias = torch.randn(experts, rows, generator=g)
    w2_bias = torch.randn(experts, hidden, generator=g)
    return Experts(w13, w13_scale, w2, w2_scale, w13_bias, w2_bias)


def make_hidden_states(tokens: int, hidden_size: int, *, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """Make normal rows whose magnitudes differ by up to 2**4 either way."""
    g = _generator(seed)
    magnitude = torch.randint(-4, 5, (tokens, 1), generator=g).to(torch.float32).exp2()
    return (torch.randn(tokens, hidden_size, generator=g) * magnitude).to(dtype)


def make_routing(
    tokens: int,
    num_experts: int,
    top_k: int,
    *,
    seed: int = 0,
    ids_dtype: torch.dtype = torch.int32,
    weights_dtype: torch.dtype = torch.float32,
    distinct: bool = True,
) -> tuple[Tensor, Tensor]:
    """Make (topk_weights, topk_ids) in no particular order; ids of a row repeat only where they must or may."""
    g = _generator(seed)
    if distinct and top_k <= num_experts:
        ids = torch.rand(tokens, num_experts, generator=g).argsort(dim=1)[:, :top_k].contiguous()
    else:
        ids = torch.randint(0, num_experts, (tokens, top_k), generator=g)
    weights = torch.randn(tokens, top_k, generator=g).softmax(dim=1)
    return weights.to(weights_dtype), ids.to(ids_dtype)


def make_layer(
    config: MoEConfig | None = None,
    *,
    kernel: str | None = None,
    experts: Experts | None = None,
    expert_map: Tensor | None = None,
    seed: int = 0,
    **config_fields: Any,
) -> FusedMoE:
    """Make a packed layer of seeded experts, ready to be called.

    Args:
        config: None = E 4, top_k 2, H 64, I 48, or what ``config_fields`` say.
        kernel: name; None = chosen automatically.
        experts: None = ``make_experts(config, seed=seed)``.
        expert_map: global to local ids.
        seed: of the experts.
        **config_fields: fields of MoEConfig.
    """
    from ..layer import FusedMoE

    if config is None:
        defaults = {"num_experts": 4, "top_k": 2, "hidden_size": 64, "intermediate_size": 48}
        config = MoEConfig(**(defaults | config_fields))
    experts = make_experts(config, seed=seed) if experts is None else experts
    layer = FusedMoE(config, kernel=kernel, expert_map=expert_map)
    layer.load_weights(**experts.tensors())
    layer.process_weights_after_loading()
    return layer


def reference_output(
    config: MoEConfig,
    experts: Experts,
    hidden_states: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    expert_map: Tensor | None = None,
) -> Tensor:
    """Return ``reference.fused_experts`` with the arguments that a config implies."""
    return reference.fused_experts(
        hidden_states,
        experts.w13_weight,
        experts.w13_weight_scale,
        experts.w2_weight,
        experts.w2_weight_scale,
        topk_weights,
        topk_ids,
        activation=config.activation,
        w13_bias=experts.w13_bias,
        w2_bias=experts.w2_bias,
        expert_map=expert_map,
        apply_router_weight_on_input=config.apply_router_weight_on_input,
        swiglu_alpha=config.swiglu_alpha,
        swiglu_limit=config.swiglu_limit,
    )


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Run with ``count`` torch threads and int8moe's thread limit at ``count``; both are put back."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        with host.override_thread_limit(count):
            yield
    finally:
        torch.set_num_threads(before)
