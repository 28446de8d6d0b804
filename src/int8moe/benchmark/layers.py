"""Layers of random weights, enough of them that the weights of a call come from memory as in a model."""

from __future__ import annotations

import time
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..binding import BoundKernel
from ..contracts import MoEConfig
from ..errors import Int8MoEError
from ..layer import FusedMoE
from .roofline import expert_bytes

_POOL_BYTES = 256 << 20
_DRAWN_BYTES = 8 << 20
_FIXED_BYTES = 128 << 20  # torch, scratch and inputs of small calls


class PackingReport(Protocol):
    """Who wants to know how far packing is."""

    def begin(self, name: str) -> None:
        """The layers of a kernel are started."""

    def advance(self, nbytes: int) -> None:
        """So many more bytes of them are loaded."""

    def end(self) -> None:
        """They are packed."""


@dataclass(frozen=True)
class LayerSet:
    """Layers of one kernel.

    Attributes:
        kernel: that packed them.
        layers: all of one shape.
        nbytes: of their int8 weights before packing.
        load_seconds: copying all of them into the layers' fresh storage.
        pack_seconds: packing all of them.
    """

    kernel: BoundKernel
    layers: tuple[FusedMoE, ...]
    nbytes: int
    load_seconds: float
    pack_seconds: float


def layer_count(config: MoEConfig, gigabytes: float) -> int:
    """How many layers of that config come closest to so many 10**9 bytes of weights; at least one."""
    return max(1, round(gigabytes * 1e9 / (config.num_experts * expert_bytes(config))))


def random_pool(config: MoEConfig) -> Tensor:
    """Random int8 weights that experts are cut from, larger than any cache; [-128, 127] all appear.

    What the weights hold does not change the time, so the layers share them.
    """
    one = expert_bytes(config)
    count = _pool_bytes(config)
    drawn = torch.empty(min(_DRAWN_BYTES, -(-count // 8) * 8) // 8, dtype=torch.int64)
    drawn.random_(-(2**63), None, generator=torch.Generator().manual_seed(0))
    pool = torch.empty(max(count, one), dtype=torch.int8)
    for piece in pool.split(drawn.nbytes):
        piece.copy_(drawn.view(torch.int8)[: piece.numel()])
    return pool


def _pool_bytes(config: MoEConfig) -> int:
    one = expert_bytes(config)
    return max(one, min(_POOL_BYTES, config.num_experts * one) // one * one)


def make_layers(config: MoEConfig, kernel: BoundKernel, count: int, pool: Tensor, progress: PackingReport) -> LayerSet:
    """Load and pack layers through their public interface, expert by expert."""
    layers = []
    load_seconds = pack_seconds = 0.0
    expert_count = 0
    one, half = expert_bytes(config), config.w13_rows * config.hidden_size
    biases: dict[str, Any] = {}
    if config.has_bias:
        biases = {"w13_bias": torch.zeros(config.w13_rows), "w2_bias": torch.zeros(config.hidden_size)}
    progress.begin(f"{count} layer{'s' if count != 1 else ''} for {kernel.name}")
    for _ in range(count):
        layer = FusedMoE(config, kernel=kernel.name)
        for expert in range(config.num_experts):
            start = expert_count * one % (pool.numel() - one + 1)
            expert_count += 1
            w13, w2 = pool[start : start + half], pool[start + half : start + one]
            began = time.perf_counter()
            layer.load_expert_weights(
                expert,
                w13_weight=w13.view(config.w13_rows, config.hidden_size),
                w13_weight_scale=0.01,
                w2_weight=w2.view(config.hidden_size, config.intermediate_size),
                w2_weight_scale=0.01,
                **biases,
            )
            load_seconds += time.perf_counter() - began
            progress.advance(one)
        began = time.perf_counter()
        layer.process_weights_after_loading()
        pack_seconds += time.perf_counter() - began
        layers.append(layer)
    progress.end()
    return LayerSet(kernel, tuple(layers), count * config.num_experts * one, load_seconds, pack_seconds)


def check_memory(
    config: MoEConfig, kernels: list[BoundKernel], count: int, *, buffer_bytes: int, tokens: int, available: int | None
) -> None:
    """Refuse what does not fit, before anything large is allocated.

    Args:
        config: of a layer.
        kernels: each gets ``count`` layers of its own.
        count: layers.
        buffer_bytes: of the buffer that is read for the bandwidth.
        tokens: the largest M.
        available: bytes of memory; None = unknown, then everything passes.

    Raises:
        Int8MoEError: how much is wanted, how much there is, and what to do.
    """
    if available is None:
        return

    def wanted(config: MoEConfig, count: int) -> tuple[int, int]:
        """Bytes of all layers, and of everything beside them."""
        rows = tokens * config.top_k * (2 * config.w13_rows + 2 * config.hidden_size) * 4
        expert = sum(_packed_expert_bytes(config, kernel) for kernel in kernels)
        return count * config.num_experts * expert, buffer_bytes + _pool_bytes(config) + rows + _FIXED_BYTES

    layers, beside = wanted(config, count)
    if layers + beside <= available:
        return
    one = layers // count
    found = (
        f"{_gb(layers + beside)} GB of memory are wanted: {count} {'layers' if count > 1 else 'layer'} of "
        f"{_gb(one // len(kernels))} GB{f' for each of {len(kernels)} kernels' if len(kernels) > 1 else ''} and "
        f"{_gb(beside)} GB beside; {_gb(available)} GB are available"
    )
    if one + beside <= available:
        fits = (available - beside) // one * config.num_experts * expert_bytes(config)
        digit = 10 ** (len(str(fits)) - 2)  # rounded down to two of them
        raise Int8MoEError(f"{found}. Give --gigabytes {fits // digit * digit / 1e9:g} or less")
    fewer = range(config.top_k, config.num_experts)
    fitting = bisect_right(fewer, available, key=lambda e: sum(wanted(config.model_copy(update={"num_experts": e}), 1)))
    if fitting:
        raise Int8MoEError(f"{found}. Give --num-experts {fewer[fitting - 1]} or fewer")
    raise Int8MoEError(f"{found}. Not even {config.top_k} experts fit; give a smaller --shape, or fewer --tokens")


def _packed_expert_bytes(config: MoEConfig, kernel: BoundKernel) -> int:
    size = kernel.packed_expert_nbytes
    packed = size(config) if size is not None else (0, 0)
    canonical = config.w13_rows * config.hidden_size, config.intermediate_size * config.hidden_size
    scales = 4 * (config.w13_rows + config.hidden_size) * (2 if config.has_bias else 1)
    return sum(map(max, packed, canonical)) + scales


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f}"
