"""The known answer that a kernel has to give before it is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from . import reference
from .contracts import KernelSpec, MoEConfig, WeightLayout
from .errors import PluginLoadError
from .testing.bits import assert_matches
from .weights import ExpertWeights, PackingKernel


class TestedKernel(PackingKernel, Protocol):
    """What the self-test needs of a bound kernel."""

    spec: KernelSpec
    apply: Callable[..., Any]
    packed_expert_nbytes: Callable[[MoEConfig], tuple[int, int]] | None


def self_test_config(spec: KernelSpec) -> MoEConfig:
    """The layer of the known answer: small, off every grid, using what the kernel declares."""
    gated = [a for a in spec.activations if not a.endswith("_no_mul")]
    activation = gated[0] if gated else spec.activations[0]
    return MoEConfig(
        num_experts=4,
        top_k=2,
        hidden_size=67,  # off every grid
        intermediate_size=33,
        activation=activation,
        has_bias="bias" in spec.features,
    )


def self_test(kernel: TestedKernel) -> WeightLayout:
    """Compare a small known answer with the reference; what the kernel declares has to hold.

    Returns:
        The layout that the kernel's packing produced.

    Raises:
        PluginLoadError: the result is not what the kernel declares.
    """
    config = self_test_config(kernel.spec)
    generator = torch.Generator().manual_seed(8)
    experts, rows, hidden, inner = 4, config.w13_rows, config.hidden_size, config.intermediate_size

    def integers(*shape: int) -> Tensor:
        return torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)

    def floats(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float32) * 0.02 + 1e-3

    tensors: dict[str, Any] = {
        "w13_weight": integers(experts, rows, hidden),
        "w13_weight_scale": floats(experts, rows),
        "w2_weight": integers(experts, hidden, inner),
        "w2_weight_scale": floats(experts, hidden),
    }
    if config.has_bias:
        tensors |= {"w13_bias": floats(experts, rows), "w2_bias": floats(experts, hidden)}
    weights = ExpertWeights(config)
    weights.allocate(kernel.packed_expert_nbytes(config) if kernel.packed_expert_nbytes else None)
    weights.load(**tensors)
    layout = weights.pack(kernel, expected_layout=kernel.spec.layout)
    ids = torch.tensor([[0, 1], [3, 0], [2, 2], [-1, 3], [-1, -1]])
    for dtype_name in kernel.spec.dtypes:
        dtype: torch.dtype = getattr(torch, dtype_name)
        hidden_states = torch.randn(5, hidden, generator=generator, dtype=torch.float32).to(dtype)
        topk_weights = torch.rand(5, 2, generator=generator, dtype=torch.float32)
        out = torch.empty(5, hidden, dtype=dtype)
        kernel.apply(weights, hidden_states, topk_weights, ids, out)
        expected = reference.fused_experts(
            hidden_states, topk_weights=topk_weights, topk_ids=ids, activation=config.activation, **tensors
        )
        try:
            assert_matches(kernel.spec.numerics, out, expected)
        except AssertionError as error:
            raise PluginLoadError(f"it declares {kernel.spec.numerics}, but against the reference {error}") from None
    return layout
