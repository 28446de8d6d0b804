"""A layer of random weights, packed by one kernel."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from int8moe.contracts import MoEConfig
from int8moe.weights import ExpertWeights


def make_layer(kernel, config: MoEConfig, seed: int = 0, expert_map=None) -> SimpleNamespace:
    """A packed layer of random weights, beside its canonical tensors for the reference."""
    generator = torch.Generator().manual_seed(seed)
    experts_, rows, hidden, inner = config.local_experts, config.w13_rows, config.hidden_size, config.intermediate_size

    def integers(*shape):
        return torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)

    def floats(*shape):
        return torch.rand(shape, generator=generator) * 0.05 / max(shape[-1], 1) ** 0.5

    values = {
        "w13_weight": integers(experts_, rows, hidden),
        "w13_weight_scale": floats(experts_, rows),
        "w2_weight": integers(experts_, hidden, inner),
        "w2_weight_scale": floats(experts_, hidden),
    }
    if config.has_bias:
        values["w13_bias"] = torch.randn(experts_, rows, generator=generator)
        values["w2_bias"] = torch.randn(experts_, hidden, generator=generator)
    weights = ExpertWeights(config, expert_map=expert_map)
    weights.allocate(kernel.packed_expert_nbytes(config))
    weights.load(**values)
    layout = kernel.process_weights_after_loading(weights)
    return SimpleNamespace(weights=weights, values=values, layout=layout, config=config, expert_map=expert_map)
