"""Hypothesis strategies for configs, inputs and routing. Needs hypothesis, which int8moe does not depend on."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from ..contracts import ACTIVATIONS, MoEConfig
from .makers import make_hidden_states, make_routing

__all__ = ["configs", "hidden_states", "routings", "sizes"]

_EDGES = (1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257)


def sizes(largest: int = 257) -> st.SearchStrategy[int]:
    """H or I: the edges of tiles, and anything between."""
    edges = [size for size in _EDGES if size <= largest]
    return st.one_of(st.sampled_from(edges), st.integers(1, largest))


@st.composite
def configs(draw: st.DrawFn, *, largest: int = 129, activations: tuple[str, ...] = ACTIVATIONS) -> MoEConfig:
    """A small MoEConfig."""
    experts = draw(st.integers(1, 8))
    top_k = draw(st.integers(1, min(experts, 4)))
    return MoEConfig(
        num_experts=experts,
        top_k=top_k,
        hidden_size=draw(sizes(largest)),
        intermediate_size=draw(sizes(largest)),
        activation=draw(st.sampled_from(activations)),
        has_bias=draw(st.booleans()),
        apply_router_weight_on_input=top_k == 1 and draw(st.booleans()),
    )


@st.composite
def hidden_states(draw: st.DrawFn, config: MoEConfig, *, tokens: int | None = None, special: bool = True) -> Tensor:
    """Seeded rows of a dtype, in some of which a few entries are any float at all."""
    count = draw(st.integers(0, 20)) if tokens is None else tokens
    dtype = draw(st.sampled_from((torch.float32, torch.bfloat16, torch.float16)))
    x = make_hidden_states(count, config.hidden_size, dtype=dtype, seed=draw(st.integers(0, 2**20)))
    if special and count:
        for _ in range(draw(st.integers(0, 3))):
            row = draw(st.integers(0, count - 1))
            column = draw(st.integers(0, config.hidden_size - 1))
            x[row, column] = torch.tensor(draw(st.floats(width=32)), dtype=torch.float32).to(dtype)
    return x


@st.composite
def routings(draw: st.DrawFn, config: MoEConfig, tokens: int, *, out_of_range: bool = True) -> tuple[Tensor, Tensor]:
    """(topk_weights, topk_ids), with ids that are left out here and there."""
    weights, ids = make_routing(
        tokens,
        config.num_experts,
        config.top_k,
        seed=draw(st.integers(0, 2**20)),
        ids_dtype=draw(st.sampled_from((torch.int32, torch.int64))),
        weights_dtype=draw(st.sampled_from((torch.float32, torch.bfloat16, torch.float16))),
        distinct=draw(st.booleans()),
    )
    if out_of_range and tokens:
        for _ in range(draw(st.integers(0, 3))):
            place = draw(st.integers(0, tokens - 1)), draw(st.integers(0, config.top_k - 1))
            ids[place] = draw(st.sampled_from((-1, -2, config.num_experts, 2**31 - 1, -(2**31))))
    return weights, ids
