"""The hook implementations of ``triton_gpu.grouped_gemm``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from int8moe.contracts import Supported, Unsupported, WeightLayout
from int8moe.hookspecs import hookimpl
from int8moe.reference import ieee_denormals

from . import devices, forward
from .tuned import steps_for

if TYPE_CHECKING:
    from int8moe.contracts import HostInfo, MoEConfig
    from int8moe.weights import ExpertWeights

    from .tiles import Steps

_MOST_TOP_K = 128
"""combine keeps the ids of a token in registers."""


class GroupedGemmExperts:
    """Hooks of the kernel; stateless."""

    @hookimpl
    def is_supported_config(self, config: MoEConfig, host: HostInfo) -> Supported | Unsupported:
        """Refuse a device without the instructions, and more slots than a token's ranking takes."""
        if config.top_k > _MOST_TOP_K:
            return Unsupported(f"top_k {config.top_k} is above {_MOST_TOP_K}")
        if not _interpreted():
            if not torch.cuda.is_available():
                return Unsupported("torch finds no usable GPU (torch.cuda.is_available() is False): check the driver")
            reason = devices.refusal(devices.find_device(torch.device("cuda", torch.cuda.current_device())))
            if reason is not None:
                return Unsupported(reason)
        return Supported()

    @hookimpl
    def process_weights_after_loading(self, layer: ExpertWeights) -> WeightLayout:
        """Nothing is packed: rows of K consecutive bytes are what int8 tensor instructions want."""
        layer.prepared = None
        _steps(layer)  # a damaged file of tuned tiles is an error here, and not while serving
        return WeightLayout.canonical()

    @hookimpl
    def restore_weights(self, layer: ExpertWeights) -> None:
        """Nothing was packed."""

    @hookimpl
    def apply(
        self, layer: ExpertWeights, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor, out: Tensor
    ) -> None:
        """Write ``out [M, H]``; any strides of the inputs are taken as they are. No call waits for the device."""
        prepared: Any = layer.prepared or _prepare(layer)
        with _on(hidden_states.device):
            forward.forward(
                prepared,
                hidden_states,
                topk_weights,
                topk_ids,
                out,
                weight_on_input=layer.config.apply_router_weight_on_input,
            )

    @hookimpl
    def apply_rows(
        self,
        layer: ExpertWeights,
        rows: Tensor,
        row_scales: Tensor | None,
        num_tokens_per_expert: Tensor,
        out: Tensor,
    ) -> None:
        """Write the un-weighted fp32 rows of step 7. The counts lie on the CPU, so that a CUDA graph cannot hold it."""
        prepared: Any = layer.prepared or _prepare(layer)
        with _on(rows.device):
            forward.rows_forward(prepared, rows, row_scales, num_tokens_per_expert, out)

    @hookimpl
    def tune(self, config: MoEConfig, tokens: tuple[int, ...], report: Callable[[str], None]) -> dict[str, str]:
        """Time tiles on this device; the file that :mod:`.tuned` reads, by its name."""
        from .tuning import tune

        return tune(config, tokens, report)


def _interpreted() -> bool:
    from triton import knobs

    return bool(knobs.runtime.interpret)


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Launches go to the current device, which may be another one than the tensors'.

    The interpreter computes in this thread, whose floating-point mode is the caller's.
    """
    return torch.cuda.device(device) if device.type == "cuda" else ieee_denormals()


def _fp32(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().to(torch.float32).contiguous()


def _steps(layer: ExpertWeights) -> Steps:
    config = layer.config
    return steps_for(layer.w13_weight.device, config.local_experts, config.intermediate_size, config.hidden_size)


def _prepare(layer: ExpertWeights) -> forward.Layer:
    config = layer.config
    device = layer.w13_weight.device
    expert_map = layer.expert_map
    if expert_map is not None:
        expert_map = expert_map.detach().to(device=device, dtype=torch.int32).contiguous()
    w13_scale, w2_scale = _fp32(layer.w13_weight_scale), _fp32(layer.w2_weight_scale)
    assert w13_scale is not None
    assert w2_scale is not None
    prepared = forward.Layer(
        w13=layer.canonical_view("w13_weight"),
        w13_scale=w13_scale,
        w13_bias=_fp32(layer.w13_bias),
        w2=layer.canonical_view("w2_weight"),
        w2_scale=w2_scale,
        w2_bias=_fp32(layer.w2_bias),
        expert_map=expert_map,
        num_experts=config.num_experts,
        activation=config.activation,
        gated=config.is_gated,
        alpha=config.swiglu_alpha,
        limit=config.swiglu_limit,
        steps=_steps(layer),
    )
    layer.prepared = prepared
    return prepared
