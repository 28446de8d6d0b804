"""Kernels whose limits are known, and samples made by hand."""

from __future__ import annotations

from typing import Any

import torch

from int8moe import KernelSpec, Numerics, WeightLayout, hookimpl
from int8moe.benchmark.disturbance import Disturbance
from int8moe.benchmark.roofline import Work
from int8moe.benchmark.summary import PointSamples, SideSamples
from int8moe.reference import ReferenceExperts

QUIET = Disturbance(2.0, 2, 0.9, 0.01, 0.0, 3, 0.5, 0.6)


class Plain:
    """Offers no limits."""

    @hookimpl
    def process_weights_after_loading(self, layer: Any) -> WeightLayout:
        return WeightLayout.canonical()

    @hookimpl
    def apply(self, layer: Any, hidden_states: Any, topk_weights: Any, topk_ids: Any, out: Any) -> None:
        ReferenceExperts().apply(layer, hidden_states, topk_weights, topk_ids, out)


class Limited(Plain):
    """Counts what is asked of it."""

    reads: list[tuple[int, int]] = []  # noqa: RUF012 (shared on purpose: the registry makes the instance)
    bursts: list[int] = []  # noqa: RUF012

    @hookimpl
    def run_peak(self, iterations: int) -> int:
        self.bursts.append(iterations)
        return 1000 * iterations

    @hookimpl
    def read_memory(self, buffer: torch.Tensor) -> None:
        self.reads.append((buffer.data_ptr(), buffer.numel()))
        assert buffer.is_contiguous()
        assert buffer.dtype == torch.uint8


class Provider:
    def __init__(self, **kernels: type) -> None:
        self._kernels = kernels

    @hookimpl
    def register_kernels(self) -> list[KernelSpec]:
        return [
            KernelSpec(
                name=f"live.{name}", target=target, activations=("silu",), dtypes=("bfloat16", "float32"),
                layout="canonical", numerics=Numerics.bitwise(), priority=1,
            )
            for name, target in self._kernels.items()
        ]  # fmt: skip


def point(
    *seconds: tuple[float, ...],
    tokens: int = 1,
    weight_bytes: int = 1000,
    ops: int = 1000,
    bandwidths: tuple[float, ...] = (1000.0,),
    peaks: tuple[float, ...] = (1000.0,),
) -> PointSamples:
    """One M with the calls of each kernel, and limits that all of them share."""
    sides = tuple(SideSamples(calls, bandwidths, peaks) for calls in seconds)
    return PointSamples(Work(tokens, 2, weight_bytes, ops), sides, QUIET)
