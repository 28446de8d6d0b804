"""The launches of one forward, in order, on one stream. Nothing here looks at a value on the device.

Grids and scratch come from shapes alone, so a call can be captured in a CUDA graph. Scratch is asked of torch's
allocator at each call: it keeps the memory, knows streams, and gives a graph memory of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .kernels.combine import combine
from .kernels.gemm import grouped_gemm
from .kernels.quantize import quantize_rows
from .kernels.routing import lay_out_blocks, place_experts, place_slots
from .tiles import ALIGNMENT, Steps, Tile

SCRATCH_BYTES = 512 * 2**20
"""More tokens than fit into so much scratch are taken in chunks: the result of a chunk depends on its rows alone."""

_SLOTS = 256  # a program of the routing kernels
_COMPARED = 8192  # (expert, block) pairs in a program of lay_out_blocks

# No fused multiply-add, in any launch: docs/numerics.md has a rounding after each multiply.
COMPILE = {"enable_fp_fusion": False}


class Layer(NamedTuple):
    """What the launches need of a packed layer, on its device.

    Attributes:
        w13: int8 ``[E, 2I, H]`` (``[E, I, H]`` without a gate), each expert's matrix contiguous.
        w2: int8 ``[E, H, I]``, likewise.
        w13_scale, w13_bias, w2_scale, w2_bias: fp32, contiguous; a bias may be None.
        expert_map: int32 ``[num_experts]``, or None.
        num_experts: how many experts ids may name.
        activation: one of int8moe.contracts.ACTIVATIONS.
        gated: whether w13 holds gate and up.
        alpha, limit: of swigluoai.
        steps: how the GEMMs are cut.
    """

    w13: Tensor
    w13_scale: Tensor
    w13_bias: Tensor | None
    w2: Tensor
    w2_scale: Tensor
    w2_bias: Tensor | None
    expert_map: Tensor | None
    num_experts: int
    activation: str
    gated: bool
    alpha: float
    limit: float
    steps: Steps

    @property
    def experts(self) -> int:
        """Experts of this layer."""
        return self.w2.shape[0]

    @property
    def hidden(self) -> int:
        """H."""
        return self.w2.shape[1]

    @property
    def inner(self) -> int:
        """I."""
        return self.w2.shape[2]


def tokens_per_chunk(layer: Layer, top_k: int) -> int:
    """How many tokens fit into SCRATCH_BYTES, at least one."""
    a_slot = 4 * layer.inner + _padded(layer.inner) + 4 * layer.hidden + 16
    return max(1, SCRATCH_BYTES // (top_k * a_slot + _padded(layer.hidden)))


def forward(
    layer: Layer, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor, out: Tensor, *, weight_on_input: bool
) -> None:
    """Steps 1 to 9 for any number of tokens; ``out [M, H]`` has the dtype of hidden_states."""
    tokens, top_k = topk_ids.shape
    if topk_weights.dtype != torch.float32:
        topk_weights = topk_weights.to(torch.float32)
    limit = tokens_per_chunk(layer, top_k)
    for start in range(0, tokens, limit):
        part = slice(start, start + limit)
        ids, weights = topk_ids[part], topk_weights[part]
        x = hidden_states[part]
        q, scale = quantize(x, weights if weight_on_input else None, layer.steps.elements)
        expert_of_slot, y = unweighted_rows(layer, q, scale, ids)
        _combine(layer, y, ids, expert_of_slot, None if weight_on_input else weights, out[part])


def rows_forward(layer: Layer, rows: Tensor, row_scales: Tensor | None, counts: Tensor, out: Tensor) -> None:
    """Step 7 for rows sorted by local expert; ``counts [E]`` lies on the CPU, ``out [T, H]`` is fp32."""
    repeated = torch.repeat_interleave(torch.arange(layer.experts), counts.to(torch.int64))
    ids = repeated.to(device=rows.device, dtype=torch.int32).unsqueeze(1)
    local = layer._replace(expert_map=None, num_experts=layer.experts)
    limit = tokens_per_chunk(layer, 1)
    for start in range(0, len(rows), limit):
        part = slice(start, start + limit)
        if row_scales is None:
            q, scale = quantize(rows[part], None, layer.steps.elements)
        else:
            q, scale = rows[part].contiguous(), row_scales[part].contiguous()
        unweighted_rows(local, q, scale, ids[part], out=out[part])


def quantize(x: Tensor, factor: Tensor | None, elements: int) -> tuple[Tensor, Tensor]:
    """Steps 1 and 2 (or 6): x ``[R, n]`` of any strides -> q int8 ``[R, n]`` of padded rows, scale fp32 ``[R]``.

    ``elements`` of x are taken at a time.
    """
    rows, columns = x.shape
    q = torch.empty((rows, _padded(columns)), dtype=torch.int8, device=x.device)[:, :columns]
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    height, width = _cut(columns, elements)
    quantize_rows[(_divided(rows, height),)](
        _as_stored(x),
        *x.stride(),
        factor,
        0 if factor is None else factor.stride(0),
        q,
        q.stride(0),
        scale,
        rows,
        columns,
        FORMAT=_format(x),
        HAS_FACTOR=factor is not None,
        ROWS=height,
        WIDTH=width,
        num_warps=4,
        **COMPILE,
    )
    return q, scale


def unweighted_rows(
    layer: Layer, q: Tensor, scale: Tensor, ids: Tensor, *, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Steps 3 to 7 for quantised tokens -> (expert of each slot int32 ``[M * k]``, y fp32 ``[M * k, H]``)."""
    tokens, top_k = ids.shape
    slots = tokens * top_k
    choice = layer.steps.step(slots, layer.experts)
    gate_up, down = choice.step.gate_up, choice.step.down
    block_m = gate_up.block_m
    device = q.device
    expert_of_slot = torch.empty(slots, dtype=torch.int32, device=device)
    slot_of_row: Tensor | None = None
    counts: Tensor | None = None
    if choice.one_row:
        blocks, expert_of_block = slots, expert_of_slot
    else:
        # Each expert pads one block at most, and there are no more blocks than slots.
        blocks = min(slots, slots // block_m + layer.experts)
        expert_of_block = torch.empty(blocks, dtype=torch.int32, device=device)
        slot_of_row = torch.full((blocks * block_m,), -1, dtype=torch.int32, device=device)
        counts = torch.zeros(layer.experts, dtype=torch.int32, device=device)
    place_experts[(_divided(slots, _SLOTS),)](
        ids,
        *ids.stride(),
        layer.expert_map,
        expert_of_slot,
        counts,
        slots,
        top_k,
        layer.num_experts,
        layer.experts,
        HAS_MAP=layer.expert_map is not None,
        COUNT=counts is not None,
        SLOTS=_SLOTS,
        **COMPILE,
    )
    if counts is not None:
        next_row = torch.empty_like(counts)
        experts = _power_of_two(layer.experts)
        piece = max(1, _COMPARED // experts)
        lay_out_blocks[(_divided(blocks, piece),)](
            counts,
            next_row,
            expert_of_block,
            blocks,
            layer.experts,
            BLOCK_M=block_m,
            EXPERTS=experts,
            BLOCKS=piece,
            num_warps=8,
            **COMPILE,
        )
        place_slots[(_divided(slots, _SLOTS),)](expert_of_slot, next_row, slot_of_row, slots, SLOTS=_SLOTS, **COMPILE)
    routed = expert_of_block, slot_of_row, blocks
    h = torch.empty((slots, layer.inner), dtype=torch.float32, device=device)
    y = torch.empty((slots, layer.hidden), dtype=torch.float32, device=device) if out is None else out
    _gemm(layer, gate_up, q, scale, layer.w13, layer.w13_scale, layer.w13_bias, h, routed, top_k, layer.activation)
    q2, scale2 = quantize(h, None, layer.steps.elements)
    _gemm(layer, down, q2, scale2, layer.w2, layer.w2_scale, layer.w2_bias, y, routed, 1, "")
    return expert_of_slot, y


def _gemm(
    layer: Layer,
    tile: Tile,
    q: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out: Tensor,
    routed: tuple[Tensor, Tensor | None, int],
    slots_per_row: int,
    activation: str,
) -> None:
    expert_of_block, slot_of_row, blocks = routed
    columns, depth = out.shape[1], weight.shape[2]
    tile = layer.steps.fitted(tile, depth)
    grouped_gemm[(blocks * _divided(columns, tile.block_n),)](
        q,
        q.stride(0),
        scale,
        weight,
        weight.stride(0),
        weight_scale,
        bias,
        out,
        expert_of_block,
        slot_of_row,
        blocks,
        columns,
        depth,
        slots_per_row,
        layer.alpha,
        layer.limit,
        ACTIVATION=activation,
        GATED=bool(activation) and layer.gated,
        HAS_BIAS=bias is not None,
        ONE_ROW=slot_of_row is None,
        EVEN_K=depth % tile.block_k == 0,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        GROUP_M=tile.group_m,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **COMPILE,
    )


def _combine(layer: Layer, y: Tensor, ids: Tensor, expert_of_slot: Tensor, weights: Tensor | None, out: Tensor) -> None:
    tokens, top_k = ids.shape
    height, width = _cut(layer.hidden, layer.steps.elements)
    # A slot takes four registers, and a row some scalar ones: with 2048 elements gfx942 runs out of them at 16 rows.
    height = max(1, min(height, layer.steps.elements // max(256, 4 * _power_of_two(top_k))))
    combine[(_divided(tokens, height), _divided(layer.hidden, width))](
        y,
        ids,
        *ids.stride(),
        expert_of_slot,
        weights,
        *((0, 0) if weights is None else weights.stride()),
        _as_stored(out),
        tokens,
        layer.hidden,
        top_k,
        FORMAT=_format(out),
        HAS_WEIGHT=weights is not None,
        SLOTS=_power_of_two(top_k),
        ROWS=height,
        WIDTH=width,
        num_warps=4,
        **COMPILE,
    )


def _cut(columns: int, elements: int) -> tuple[int, int]:
    """Rows and columns of one step, ``elements`` of them; more than one row where the rows are short.

    It does not follow the number of rows: another batch size would be another kernel to compile.
    """
    width = min(elements, _power_of_two(columns))
    return elements // width, width


def _as_stored(tensor: Tensor) -> Tensor:
    """The tensor as device code takes it: bf16 as its bits."""
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


def _format(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _padded(columns: int) -> int:
    return -(-columns // ALIGNMENT) * ALIGNMENT


def _divided(length: int, piece: int) -> int:
    return -(-length // piece)


def _power_of_two(length: int) -> int:
    """The least power of two that is not below ``length``."""
    return 1 << max(0, length - 1).bit_length()
