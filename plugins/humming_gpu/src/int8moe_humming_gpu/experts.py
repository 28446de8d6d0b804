"""The hook implementations of ``humming_gpu.grouped_gemm``, on the functions of humming-kernels."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from int8moe.contracts import Supported, Unsupported, WeightLayout
from int8moe.elementary import activate
from int8moe.hookspecs import hookimpl

from . import conversion
from .plugin import LAYOUT

if TYPE_CHECKING:
    from int8moe.contracts import HostInfo, MoEConfig
    from int8moe.weights import ExpertWeights

_MULTIPLE = 128
_OLDEST = (8, 0)
_GROUPED = {"gemm_type": "grouped_contiguous"}


class HummingExperts:
    """Hooks of the kernel; stateless."""

    @hookimpl
    def is_supported_config(self, config: MoEConfig, host: HostInfo) -> Supported | Unsupported:
        """Refuse shapes that would need padding, and devices without int8 tensor instructions."""
        for name, size in (("hidden_size", config.hidden_size), ("intermediate_size", config.intermediate_size)):
            if size % _MULTIPLE:
                return Unsupported(f"{name} {size} is not a multiple of {_MULTIPLE}")
        if not torch.cuda.is_available():
            return Unsupported("torch finds no usable GPU (torch.cuda.is_available() is False): check the driver")
        capability = torch.cuda.get_device_capability()
        if capability < _OLDEST:
            return Unsupported(f"the device is sm_{capability[0]}{capability[1]}; sm_80 or newer is needed")
        return Supported()

    @hookimpl
    def process_weights_after_loading(self, layer: ExpertWeights) -> WeightLayout:
        """Convert both weights; the canonical ones are freed, one after the other."""
        nbytes = 0
        for name, columns, depth in _shapes(layer.config):
            canonical = layer.canonical_view(f"{name}_weight").contiguous()
            tensors = conversion.convert(
                canonical, getattr(layer, f"{name}_weight_scale"), _dtype(layer.config), columns, depth
            )
            setattr(layer, f"{name}_weight", tensors["weight"])
            layer.aux[f"{name}_scale"] = tensors["weight_scale"]
            # Its GEMM synchronises blocks through them, so that two layers must not share any.
            layer.aux[f"{name}_locks"] = torch.zeros(2048, dtype=torch.int32, device=canonical.device)
            nbytes += tensors["weight"].nbytes
        return WeightLayout(namespace="humming_gpu", name=LAYOUT, nbytes=nbytes)

    @hookimpl
    def apply(
        self, layer: ExpertWeights, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor, out: Tensor
    ) -> None:
        """Write ``out [M, H]``; every grid and shape is made of shapes, no call waits for the device."""
        config = layer.config
        tokens, top_k = topk_ids.shape
        if tokens == 0 or config.local_experts == 0:
            out.zero_()
            return
        weights = topk_weights.to(torch.float32)
        x = hidden_states
        if config.apply_router_weight_on_input:
            x = x.to(torch.float32) * weights
            weights = torch.ones_like(weights)
        expert = local_experts(layer, topk_ids)
        order, starts = sort_slots(expert, config.local_experts)
        rows = x[order // top_k].to(_dtype(config))
        d = self._gemm(layer, "w13", rows, starts).to(torch.float32)
        halves = d.chunk(2, dim=1) if config.is_gated else (d,)
        h = activate(
            *halves,
            activation=config.activation,
            swiglu_alpha=config.swiglu_alpha,
            swiglu_limit=config.swiglu_limit,
        )
        y = self._gemm(layer, "w2", h.to(_dtype(config)), starts)
        combine(y, order, expert < config.local_experts, weights, out)

    def _gemm(self, layer: ExpertWeights, name: str, rows: Tensor, starts: Tensor) -> Tensor:
        from humming.forward import humming_forward

        columns, depth = next((n, k) for found, n, k in _shapes(layer.config) if found == name)
        config = _layer_config(layer.config.local_experts, columns, depth, _dtype(layer.config), rows.device)
        return humming_forward(
            config,
            inputs=rows.contiguous(),
            weight=getattr(layer, f"{name}_weight"),
            weight_scale=layer.aux[f"{name}_scale"],
            expert_layout=starts,
            locks=layer.aux[f"{name}_locks"],
            compute_config=_GROUPED,
        )


def local_experts(layer: ExpertWeights, topk_ids: Tensor) -> Tensor:
    """``[M, k]`` ids -> int64 ``[M * k]`` local experts; E for a slot that contributes nothing."""
    config = layer.config
    ids = topk_ids.reshape(-1).to(torch.int64)
    known = (ids >= 0) & (ids < config.num_experts)
    local = torch.where(known, ids, 0)
    if layer.expert_map is not None:
        local = layer.expert_map.to(device=ids.device, dtype=torch.int64)[local]
        known = known & (local >= 0)
    return torch.where(known, local, config.local_experts)


def sort_slots(expert: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """The slots in order of their expert, and where each expert's begin: int64 ``[E + 1]``, as humming wants it.

    Slots that contribute nothing come last, beyond the last start, and are not computed.
    """
    order = torch.argsort(expert, stable=True)
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=expert.device)
    counts.scatter_add_(0, expert, torch.ones_like(expert))
    ends = counts[:experts].cumsum(0)
    return order, torch.cat([torch.zeros_like(ends[:1]), ends])


def combine(y: Tensor, order: Tensor, present: Tensor, weights: Tensor, out: Tensor) -> None:
    """Rows ``[M * k, H]`` in the order of sort_slots, weighted and summed into ``out [M, H]``.

    ``present [M * k]`` is False for slots whose rows were not computed: whatever stands there is not used.
    """
    tokens, top_k = weights.shape
    by_slot = torch.empty_like(y, dtype=torch.float32)
    by_slot[order] = y.to(torch.float32)
    weighted = by_slot.view(tokens, top_k, -1) * weights.unsqueeze(2)
    out.copy_(weighted.masked_fill(~present.view(tokens, top_k, 1), 0.0).sum(1))


def _dtype(config: MoEConfig) -> torch.dtype:
    """What the package computes in between: the layer's dtype, bf16 where it takes any."""
    return torch.float16 if config.hidden_dtype == "float16" else torch.bfloat16


def _shapes(config: MoEConfig) -> tuple[tuple[str, int, int], tuple[str, int, int]]:
    """Name, columns and depth of both weights."""
    return (
        ("w13", config.w13_rows, config.hidden_size),
        ("w2", config.hidden_size, config.intermediate_size),
    )


@lru_cache(maxsize=64)
def _layer_config(experts: int, columns: int, depth: int, dtype: torch.dtype, device: torch.device) -> Any:
    return conversion.layer_config(experts, columns, depth, dtype, device)
