"""The known answer that a kernel has to give before it is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


_SIZES = ((67, 33), (64, 32), (128, 128), (256, 256), (512, 256))
"""(hidden_size, intermediate_size): first off every grid, then what a kernel with conditions may take."""

_MANY = 40
"""Tokens of one expert: kernels may take another way for many rows, and a matrix unit's tile has 16 or 32."""


def self_test_configs(spec: KernelSpec, config: MoEConfig | None = None) -> Iterator[MoEConfig]:
    """Small layers that use what the kernel declares; last, a few experts of the layer that is asked for."""
    gated = [a for a in spec.activations if not a.endswith("_no_mul")]
    usual = MoEConfig(
        num_experts=4,
        top_k=2,
        hidden_size=1,
        intermediate_size=1,
        activation=gated[0] if gated else spec.activations[0],
        has_bias="bias" in spec.features,
    )
    for hidden, inner in _SIZES:
        yield usual.model_copy(update={"hidden_size": hidden, "intermediate_size": inner})
    if config is not None:
        plain = {"num_local_experts": None, "has_expert_map": False, "apply_router_weight_on_input": False}
        yield config.model_copy(update={**plain, "num_experts": 4, "top_k": 2})
        yield config.model_copy(update={**plain, "num_experts": min(config.num_experts, 8)})


def self_test(kernel: TestedKernel, config: MoEConfig) -> WeightLayout:
    """Compare a small known answer with the reference; what the kernel declares has to hold.

    Returns:
        The layout that the kernel's packing produced.

    Raises:
        PluginLoadError: the result is not what the kernel declares.
    """
    generator = torch.Generator().manual_seed(8)
    experts, rows, hidden, inner = config.num_experts, config.w13_rows, config.hidden_size, config.intermediate_size

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
    device = kernel.spec.device
    weights = ExpertWeights(config, device=device)
    weights.allocate(kernel.packed_expert_nbytes(config) if kernel.packed_expert_nbytes else None)
    weights.load(**tensors)
    layout = weights.pack(kernel, expected_layout=kernel.spec.layout)
    few = torch.randint(0, experts, (5, config.top_k), generator=generator)
    few[2], few[3, 0], few[4] = few[2, 0].clone(), -1, -1  # an expert named again, a slot left out, none left
    calls = [(name, few) for name in kernel.spec.dtypes]
    if hidden <= _SIZES[-1][0]:  # a real layer's reference would take long
        many = torch.randint(0, experts, (_MANY, config.top_k), generator=generator)
        many[:, 0] = 0
        calls.append((kernel.spec.dtypes[0], many))
    for dtype_name, ids in calls:
        dtype: torch.dtype = getattr(torch, dtype_name)
        tokens = len(ids)
        hidden_states = torch.randn(tokens, hidden, generator=generator, dtype=torch.float32).to(dtype)
        topk_weights = torch.rand(tokens, config.top_k, generator=generator, dtype=torch.float32)
        out = torch.empty(tokens, hidden, dtype=dtype, device=device)
        kernel.apply(weights, hidden_states.to(device), topk_weights.to(device), ids.to(device), out)
        expected = reference.fused_experts(
            hidden_states,
            topk_weights=topk_weights,
            topk_ids=ids,
            activation=config.activation,
            swiglu_alpha=config.swiglu_alpha,
            swiglu_limit=config.swiglu_limit,
            **tensors,
        )
        try:
            assert_matches(kernel.spec.numerics, out.cpu(), expected)
        except AssertionError as error:
            raise PluginLoadError(f"it declares {kernel.spec.numerics}, but against the reference {error}") from None
    return layout
