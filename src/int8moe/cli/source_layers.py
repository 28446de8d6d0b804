"""The layers that ``int8moe run`` runs, from a checkpoint or made in memory. Imports torch.

Each layer can be had twice, on two ways: packed and ready to run, and as the canonical tensors of a few
experts, which the reference gets. For a checkpoint the second way reads the files anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..checkpoint import CheckpointPlan, LayerPlan, PackedCache, load_moe_layers, load_router, load_router_biases
from ..contracts import MoEConfig
from ..layer import FusedMoE
from ..quantize import quantize_experts
from ..routing import select_experts
from .canonical import Canonical, read_experts

Advance = Callable[[int], None]


class Loaded(NamedTuple):
    """A packed layer, the seconds that packing alone took, and what the packed cache did."""

    layer: FusedMoE
    pack_seconds: float
    cache: str
    """A state of CacheOutcome; "" where there is no cache."""


class SourceLayer(Protocol):
    """One MoE layer of a source."""

    @property
    def name(self) -> str:
        """How the layer is called."""

    @property
    def config(self) -> MoEConfig:
        """What it computes."""

    @property
    def nbytes(self) -> int:
        """Bytes of its experts' weights at the source."""

    def load(self, kernel: str | None, advance: Advance) -> Loaded:
        """The packed layer."""

    def route(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """topk_weights and topk_ids from the layer's own router."""

    def canonical(self, experts: Sequence[int]) -> Canonical:
        """The canonical tensors of these experts, which have never been packed."""


class CheckpointLayer:
    """A layer of a checkpoint."""

    def __init__(self, plan: CheckpointPlan, layer: LayerPlan, cache: PackedCache | None = None) -> None:
        self._plan, self._layer, self._cache = plan, layer, cache
        self.name = layer.key
        self.config = layer.config
        self.nbytes = layer.nbytes

    def load(self, kernel: str | None, advance: Advance) -> Loaded:
        """Stream the layer in, quantising it first where it is stored in floats; or take it from the cache."""
        read = 0
        last_read = time.perf_counter()

        def note(key: str, done: int, total: int) -> None:
            nonlocal read, last_read
            advance(done - read)
            read, last_read = done, time.perf_counter()

        layers = load_moe_layers(
            self._plan,
            kernel=kernel,
            layers=[self._layer.index],
            quantize=not self._layer.quantized,
            progress=note,
            cache=self._cache,
        )
        seconds = time.perf_counter() - last_read  # packing follows the last expert
        outcome = None if self._cache is None else self._cache.outcomes.get(self.name)
        if outcome is None:
            return Loaded(layers[self.name], seconds, "")
        if outcome.state == "read":
            return Loaded(layers[self.name], 0.0, outcome.state)
        return Loaded(layers[self.name], max(seconds - outcome.seconds, 0.0), outcome.state)

    def route(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Apply the router that the checkpoint holds, as the model would."""
        weight = load_router(self._plan, self._layer)
        bias, correction_bias = load_router_biases(self._plan, self._layer)
        logits = hidden_states.to(torch.float32) @ weight.t()
        routing = self._plan.routing
        return select_experts(
            logits if bias is None else logits + bias,
            self.config.top_k,
            scoring=routing.scoring,
            renormalize=routing.renormalize,
            e_score_correction_bias=correction_bias,
            num_expert_group=routing.num_groups,
            topk_group=routing.topk_groups,
            routed_scaling_factor=routing.scaling_factor,
        )

    def canonical(self, experts: Sequence[int]) -> Canonical:
        """Read these experts from the files again."""
        return read_experts(self._layer, experts)


class SeededLayer:
    """Experts made in memory from a seed and quantised by int8moe itself."""

    name = "seeded layer"

    def __init__(self, config: MoEConfig, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.config = config
        experts, hidden, inner = config.num_experts, config.hidden_size, config.intermediate_size
        w13 = torch.randn(experts, config.w13_rows, hidden, generator=generator) / hidden**0.5
        w2 = torch.randn(experts, hidden, inner, generator=generator) / inner**0.5
        self._router = torch.randn(experts, hidden, generator=generator) / hidden**0.5
        self._tensors = Canonical(*quantize_experts(w13, w2))
        self.nbytes = self._tensors.w13_weight.numel() + self._tensors.w2_weight.numel()

    def load(self, kernel: str | None, advance: Advance) -> Loaded:
        """Copy the experts into a layer and pack it."""
        layer = FusedMoE(self.config, kernel=kernel)
        layer.load_weights(**self._tensors._asdict())
        started = time.perf_counter()
        layer.process_weights_after_loading()
        advance(self.nbytes)
        return Loaded(layer, time.perf_counter() - started, "")

    def route(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Apply the seeded router."""
        return select_experts(hidden_states.to(torch.float32) @ self._router.t(), self.config.top_k)

    def canonical(self, experts: Sequence[int]) -> Canonical:
        """The tensors as they were quantised: the layer copied them."""
        return self._tensors.select(experts)
