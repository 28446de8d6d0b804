"""The two hook specifications, and the markers that plugins use. Imports no torch.

``KernelProvider`` is implemented by an entry point (a module or an instance) and declares kernels.
``FusedMoEExperts`` is implemented by one kernel's class and does the work. Parameter names and their
order are the contract: binding refuses an implementation that differs, naming the hook.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from .contracts import HostInfo, KernelSpec, MoEConfig, Supported, Unsupported, WeightLayout
    from .weights import ExpertWeights

PROJECT = "int8moe"
ENTRY_POINT_GROUP = "int8moe.kernels"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

REQUIRED_HOOKS = ("process_weights_after_loading", "apply")


class KernelProvider:
    """Declares kernels. May also carry ``isa_ladder``: kernel short names, weakest first."""

    @hookspec
    def register_kernels(self) -> list[KernelSpec]:  # type: ignore[empty-body]
        """Return the KernelSpecs of this provider; import no torch, and never raise for a foreign machine."""


class FusedMoEExperts:
    """What one kernel does. One stateless object per process; all state of a layer is in ``layer``."""

    @hookspec(firstresult=True)
    def is_supported_config(self, config: MoEConfig, host: HostInfo) -> Supported | Unsupported:  # type: ignore[empty-body]
        """Optional: refuse a config for a reason that KernelSpec cannot say."""

    @hookspec(firstresult=True)
    def packed_expert_nbytes(self, config: MoEConfig) -> tuple[int, int]:  # type: ignore[empty-body]
        """Optional: bytes of one packed expert's w13 and w2, so that the layer allocates them up front.

        With it ``layer.expert_bytes(name)`` has rows of at least that size and packing can run in place.
        Without it the canonical sizes are allocated.
        """

    @hookspec(firstresult=True)
    def process_weights_after_loading(self, layer: ExpertWeights) -> WeightLayout:  # type: ignore[empty-body]
        """Required: pack the layer's canonical tensors and return the layout that this produced."""

    @hookspec(firstresult=True)
    def apply(
        self,
        layer: ExpertWeights,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Required: write ``out [M, H]`` (dtype of hidden_states, contiguous) as docs/numerics.md says.

        hidden_states ``[M, H]`` bf16 | fp16 | fp32, topk_ids ``[M, k]`` int32 | int64 and topk_weights
        ``[M, k]`` of any float dtype may have any strides, and are never written.
        """

    @hookspec(firstresult=True)
    def apply_rows(
        self,
        layer: ExpertWeights,
        rows: torch.Tensor,
        row_scales: torch.Tensor | None,
        num_tokens_per_expert: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Optional: the un-weighted rows of step 7 for rows already sorted by local expert.

        rows ``[T, H]`` bf16 | fp16 | fp32, or int8 with row_scales ``[T]`` fp32; num_tokens_per_expert
        ``[local experts]`` int32 | int64 on the CPU; writes out ``[T, H]`` fp32.
        """

    @hookspec(firstresult=True)
    def release_scratch(self) -> None:
        """Optional: free memory that is kept between calls; asked for by FusedMoE.reset()."""

    @hookspec(firstresult=True)
    def run_peak(self, iterations: int) -> int:  # type: ignore[empty-body]
        """Optional, for benchmarks: the fastest multiply-add that the kernel has, from registers or the nearest cache.

        Every thread that a forward would use goes ``iterations`` times round it; returns how many int8 multiply-adds
        all of them did together. The caller takes the time.
        """

    @hookspec(firstresult=True)
    def read_memory(self, buffer: torch.Tensor) -> None:
        """Optional, for benchmarks: read every byte of a contiguous uint8 ``buffer`` once, in those threads."""

    @hookspec(firstresult=True)
    def tune(  # type: ignore[empty-body]
        self, config: MoEConfig, tokens: tuple[int, ...], report: Callable[[str], None]
    ) -> dict[str, str]:
        """Optional: measure what is fastest for a layer on this machine, for ``int8moe tune``.

        Args:
            config: the layer.
            tokens: numbers of tokens of a call, to measure with.
            report: is told what was found, a line each.

        Returns:
            {file name: text}. The caller writes them to ``int8moe.tuned_files.tuned_folder(namespace)``, where the
            kernel looks for them.
        """

    @hookspec(firstresult=True)
    def restore_weights(self, layer: ExpertWeights) -> None:
        """Optional: turn packed weights back into the canonical tensors, in place."""
