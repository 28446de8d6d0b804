"""docs/numerics.md in eager torch: the definition of every bit, and the kernel ``reference.torch``.

Only IEEE-correct fp32 operations are used, one rounding each. Integer sums are taken in float64, which
is exact here: every product and partial sum stays below 2**53. Float operations run on blocks small enough
for torch to keep them in the calling thread, whose floating-point control word is guarded
(``torch.set_flush_denormal`` in the caller changes no bit).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from .contracts import ACTIVATIONS, MoEConfig, WeightLayout
from .elementary import activate, erf, exp, gelu, gelu_tanh, silu, swigluoai, tanh
from .hookspecs import hookimpl

__all__ = [
    "ReferenceExperts",
    "activate",
    "elementwise",
    "erf",
    "exp",
    "expert_rows",
    "fused_experts",
    "gelu",
    "gelu_tanh",
    "ieee_denormals",
    "integer_matmul",
    "quantize_rows",
    "round_to_dtype",
    "silu",
    "sorted_rows",
    "swigluoai",
    "tanh",
]

if TYPE_CHECKING:
    from .weights import ExpertWeights

# torch keeps an elementwise operation of fewer elements than this in the calling thread.
_SERIAL_ELEMENTS = 32_768


@contextlib.contextmanager
def ieee_denormals() -> Iterator[None]:
    """Switch flush-to-zero off in this thread, and put it back."""
    flushing = bool((torch.full((1,), 2.0**-126, dtype=torch.float32, device="cpu") * 0.5 == 0).item())
    if flushing:
        torch.set_flush_denormal(False)
    try:
        yield
    finally:
        if flushing:
            torch.set_flush_denormal(True)


def elementwise(function: Callable[..., Tensor], *operands: Tensor) -> Tensor:
    """Apply an elementwise function to 2-D operands of R or 1 rows and N or 1 columns, in blocks -> ``[R, N]``.

    Each block is small enough for torch to keep it in the calling thread, whose control word is guarded
    (:func:`ieee_denormals`).
    """
    # torch.broadcast_shapes would import sympy, half a second.
    rows, columns = (next((n for n in sizes if n != 1), 1) for sizes in zip(*(o.shape for o in operands), strict=True))
    if rows * columns < _SERIAL_ELEMENTS:
        return function(*operands)
    width = min(columns, _SERIAL_ELEMENTS - 1)
    height = max(1, (_SERIAL_ELEMENTS - 1) // width)
    bands = []
    for top in range(0, rows, height):
        band = [operand if operand.shape[0] == 1 else operand[top : top + height] for operand in operands]
        pieces = [
            function(*(b if b.shape[1] == 1 else b[:, left : left + width] for b in band))
            for left in range(0, columns, width)
        ]
        bands.append(pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1))
    return torch.cat(bands)


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Q of docs/numerics.md: fp32 rows ``[R, n]`` -> (int8 ``[R, n]``, fp32 scales ``[R]``)."""
    rows = rows.contiguous()
    if rows.numel() == 0:
        return rows.to(torch.int8), torch.zeros(rows.shape[0], dtype=torch.float32, device=rows.device)
    # Compared as integers, so that NaN > Inf > any finite value.
    amax = (rows.view(torch.int32) & 0x7FFFFFFF).amax(dim=1, keepdim=True).view(torch.float32)
    inverse = elementwise(_inverse_scale, amax)
    return elementwise(_round_to_int8, rows, inverse), elementwise(_row_scale, amax, inverse).squeeze(1)


def _inverse_scale(amax: Tensor) -> Tensor:
    """127 / amax; 0 for a row that is quantised to zeros (amax not finite, 0, or too small)."""
    inverse = torch.div(torch.full_like(amax, 127.0), amax)  # 127 / amax would be reciprocal() * 127
    live = torch.isfinite(amax) & torch.isfinite(inverse)
    return torch.where(live, inverse, torch.zeros_like(inverse))


def _row_scale(amax: Tensor, inverse: Tensor) -> Tensor:
    scale = torch.div(amax, torch.full_like(amax, 127.0))
    scale = torch.where(inverse == 0, torch.zeros_like(scale), scale)
    return torch.where(torch.isfinite(amax), scale, torch.full_like(scale, math.nan))


def _round_to_int8(rows: Tensor, inverse: Tensor) -> Tensor:
    # A row of zeros may hold Inf or NaN: its products are thrown away before the conversion.
    scaled = torch.where(inverse == 0, torch.zeros_like(rows), rows * inverse)
    return torch.clamp(torch.round(scaled), -127.0, 127.0).to(torch.int8)


def integer_matmul(q: Tensor, weight: Tensor) -> Tensor:
    """Exact ``q [R, K] @ weight [N, K].T`` of int8 operands, as int32 ``[R, N]``."""
    # float64: products below 2**14, at most 65,793 of them, sums below 2**53.
    return (q.to(torch.float64) @ weight.to(torch.float64).t()).to(torch.int32)


def _dequantize(acc: Tensor, row_scale: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    d = elementwise(
        lambda a, s, w: (a.to(torch.float32) * s) * w, acc, row_scale.unsqueeze(1), weight_scale.unsqueeze(0)
    )
    return d if bias is None else elementwise(torch.add, d, bias.unsqueeze(0))


def round_to_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """One rounding of fp32 to the output dtype, half to even; denormals are kept."""
    if dtype == torch.bfloat16:
        bits = x.contiguous().view(torch.int32)
        # Wraps for no finite value; NaN is set apart because rounding could carry it to Inf.
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = torch.where(torch.isnan(x), torch.full_like(rounded, 0x7FC0), rounded)
        return rounded.to(torch.int16).view(torch.bfloat16)
    return x.to(dtype)


def expert_rows(
    q: Tensor,
    scales: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w13_bias: Tensor | None,
    w2: Tensor,
    w2_scale: Tensor,
    w2_bias: Tensor | None,
    *,
    activation: str,
    swiglu_alpha: float,
    swiglu_limit: float,
) -> Tensor:
    """Steps 3 to 7 for the quantised rows of one expert: int8 ``[R, H]`` -> un-weighted fp32 ``[R, H]``."""
    d = _dequantize(integer_matmul(q, w13), scales, w13_scale, w13_bias)
    halves = (d,) if activation.endswith("_no_mul") else d.chunk(2, dim=1)
    h = elementwise(
        lambda *gate_up: activate(
            *gate_up, activation=activation, swiglu_alpha=swiglu_alpha, swiglu_limit=swiglu_limit
        ),
        *halves,
    )
    q2, s2 = quantize_rows(h)
    return _dequantize(integer_matmul(q2, w2), s2, w2_scale, w2_bias)


class ExpertTensors(Protocol):
    """Canonical tensors of a layer, under the names that engines use; biases may be None."""

    @property
    def w13_weight(self) -> Tensor: ...

    @property
    def w13_weight_scale(self) -> Tensor: ...

    @property
    def w13_bias(self) -> Tensor | None: ...

    @property
    def w2_weight(self) -> Tensor: ...

    @property
    def w2_weight_scale(self) -> Tensor: ...

    @property
    def w2_bias(self) -> Tensor | None: ...


def sorted_rows(experts: ExpertTensors, config: MoEConfig, q: Tensor, scales: Tensor, counts: list[int]) -> Tensor:
    """Steps 3 to 7 for quantised rows ``[T, H]`` sorted by local expert, ``counts`` of them each -> fp32 ``[T, H]``."""
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    start = 0
    for local, count in enumerate(counts):
        stop = start + count
        if count:
            out[start:stop] = expert_rows(
                q[start:stop],
                scales[start:stop],
                experts.w13_weight[local],
                experts.w13_weight_scale[local],
                None if experts.w13_bias is None else experts.w13_bias[local],
                experts.w2_weight[local],
                experts.w2_weight_scale[local],
                None if experts.w2_bias is None else experts.w2_bias[local],
                activation=config.activation,
                swiglu_alpha=config.swiglu_alpha,
                swiglu_limit=config.swiglu_limit,
            )
        start = stop
    return out


def _channel_scales(scale: Tensor, experts: int, rows: int) -> Tensor:
    return scale.to(torch.float32).reshape(experts, rows)


def fused_experts(
    hidden_states: Tensor,
    w13_weight: Tensor,
    w13_weight_scale: Tensor,
    w2_weight: Tensor,
    w2_weight_scale: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    activation: str = "silu",
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    expert_map: Tensor | None = None,
    apply_router_weight_on_input: bool = False,
    swiglu_alpha: float = 1.702,
    swiglu_limit: float = 7.0,
) -> Tensor:
    """The routed experts of one MoE layer, exactly as docs/numerics.md says.

    Args:
        hidden_states: ``[M, H]`` bfloat16, float16 or float32, any strides.
        w13_weight: int8 ``[E, 2I, H]``, gate rows first; ``[E, I, H]`` for activations without a gate.
        w13_weight_scale: fp32 ``[E, 2I]`` (a trailing 1 is accepted).
        w2_weight: int8 ``[E, H, I]``.
        w2_weight_scale: fp32 ``[E, H]`` (a trailing 1 is accepted).
        topk_weights: ``[M, k]`` of any float dtype, taken to fp32.
        topk_ids: ``[M, k]`` int32 or int64; global ids. Out-of-range ids contribute nothing.
        activation: one of ``int8moe.contracts.ACTIVATIONS``.
        w13_bias: fp32 ``[E, 2I]`` or None.
        w2_bias: fp32 ``[E, H]`` or None.
        expert_map: int ``[num_experts]``, global to local id or -1; None = ids are local.
        apply_router_weight_on_input: scale the input by the router weight, k = 1 only.
        swiglu_alpha: alpha of ``swigluoai``.
        swiglu_limit: clamp of ``swigluoai``.

    Returns:
        ``[M, H]`` in the dtype of hidden_states; nothing that was passed in is written.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is not one of {', '.join(ACTIVATIONS)}")
    tokens, hidden_size = hidden_states.shape
    experts, w13_rows, _ = w13_weight.shape
    top_k = topk_ids.shape[1]
    if apply_router_weight_on_input and top_k != 1:
        raise ValueError(f"apply_router_weight_on_input needs top_k = 1, found {top_k}")
    with torch.no_grad(), ieee_denormals():
        w13_scale = _channel_scales(w13_weight_scale, experts, w13_rows)
        w2_scale = _channel_scales(w2_weight_scale, experts, hidden_size)
        weights = topk_weights.to(torch.float32)
        ids = topk_ids.to(torch.int64)
        num_experts = experts if expert_map is None else expert_map.numel()
        table = torch.arange(num_experts, device="cpu") if expert_map is None else expert_map.to("cpu", torch.int64)
        local_of = table.reshape(-1).tolist()
        x = hidden_states.to(torch.float32)
        if apply_router_weight_on_input and tokens:
            x = elementwise(lambda rows, weight: rows * weight, x, weights)
            weights = torch.ones_like(weights)
        q, scales = quantize_rows(x)
        out = torch.zeros((tokens, hidden_size), dtype=torch.float32, device=x.device)
        for expert in sorted(set(ids.flatten().tolist())):
            if not 0 <= expert < num_experts or not 0 <= local_of[expert] < experts:
                continue
            local = local_of[expert]
            token, slot = (ids == expert).nonzero(as_tuple=True)
            y = expert_rows(
                q[token],
                scales[token],
                w13_weight[local],
                w13_scale[local],
                None if w13_bias is None else w13_bias[local].to(torch.float32),
                w2_weight[local],
                w2_scale[local],
                None if w2_bias is None else w2_bias[local].to(torch.float32),
                activation=activation,
                swiglu_alpha=swiglu_alpha,
                swiglu_limit=swiglu_limit,
            )
            for position in range(top_k):  # a token names an expert at most once in a column of ids
                rows = (slot == position).nonzero(as_tuple=True)[0]
                if len(rows):
                    owners = token[rows]
                    out[owners] = elementwise(
                        lambda total, row, weight: total + weight * row,
                        out[owners],
                        y[rows],
                        weights[owners, position].unsqueeze(1),
                    )
        return round_to_dtype(out, hidden_states.dtype)


class ReferenceExperts:
    """Hook implementations of ``reference.torch``: packs nothing, and computes the definition."""

    @hookimpl
    def process_weights_after_loading(self, layer: ExpertWeights) -> WeightLayout:
        """Leave the canonical tensors as they are."""
        return WeightLayout.canonical()

    @hookimpl
    def restore_weights(self, layer: ExpertWeights) -> None:
        """Nothing was packed."""

    @hookimpl
    def apply(
        self, layer: ExpertWeights, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor, out: Tensor
    ) -> None:
        """Write :func:`fused_experts` of the layer into ``out``."""
        config = layer.config
        out.copy_(
            fused_experts(
                hidden_states,
                layer.w13_weight,
                layer.w13_weight_scale,
                layer.w2_weight,
                layer.w2_weight_scale,
                topk_weights,
                topk_ids,
                activation=config.activation,
                w13_bias=layer.w13_bias,
                w2_bias=layer.w2_bias,
                expert_map=layer.expert_map,
                apply_router_weight_on_input=config.apply_router_weight_on_input,
                swiglu_alpha=config.swiglu_alpha,
                swiglu_limit=config.swiglu_limit,
            )
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
        """Write the un-weighted rows of step 7."""
        config = layer.config
        with torch.no_grad(), ieee_denormals():
            if row_scales is None:
                q, scales = quantize_rows(rows.to(torch.float32))
            else:
                q, scales = rows, row_scales
            out.copy_(sorted_rows(layer, config, q, scales, num_tokens_per_expert.tolist()))
