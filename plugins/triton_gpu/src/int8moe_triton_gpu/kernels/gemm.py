"""Steps 3 to 5, and step 7: an int8 GEMM for each block of slots of one expert, and what follows in fp32.

The accumulator is int32 over the whole of K, so the sum is exact in any order and whatever the tile. Weights are read
as they are stored, ``[E, N, K]`` with K innermost: the operand order that int8 tensor instructions want.
"""

import triton
import triton.language as tl

from .elementary import activate


@triton.jit
def _weight_tile(w_ptr, row_start, k, K, EVEN_K: tl.constexpr):
    """int8 ``[BLOCK_K, BLOCK_N]`` of the weights whose rows begin at row_start."""
    pointers = w_ptr + row_start[None, :] + k[:, None]
    if EVEN_K:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=(k < K)[:, None], other=0)


@triton.jit
def _activation_tile(q_rows, k, K, EVEN_K: tl.constexpr):
    """int8 ``[BLOCK_M, BLOCK_K]`` of the quantised rows that q_rows ``[BLOCK_M, 1]`` points to."""
    pointers = q_rows + k[None, :]
    if EVEN_K:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=(k < K)[None, :], other=0)


@triton.jit
def _dequantize(acc, row_scale, w_scale_ptr, bias_ptr, at, mask, HAS_BIAS: tl.constexpr):
    """(fp32(acc) * row_scale) * weight_scale, then + bias; ``at`` indexes scale and bias by column."""
    d = (acc.to(tl.float32) * row_scale[:, None]) * tl.load(w_scale_ptr + at, mask=mask, other=0.0)[None, :]
    if HAS_BIAS:
        d = d + tl.load(bias_ptr + at, mask=mask, other=0.0)[None, :]
    return d


@triton.jit(do_not_specialize=["blocks"])
def grouped_gemm(
    q_ptr,
    q_row_stride,
    row_scale_ptr,
    w_ptr,
    w_expert_stride,
    w_scale_ptr,
    bias_ptr,
    out_ptr,
    expert_of_block_ptr,
    slot_of_row_ptr,
    blocks,
    N,
    K,
    slots_per_row,
    alpha,
    limit,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ONE_ROW: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Out fp32 ``[slots, N]`` of q int8 ``[slots / slots_per_row, K]`` and w int8 ``[E, N or 2 N, K]``.

    ACTIVATION "" is step 7 (dequantise), any other steps 3 to 5; GATED: w holds N rows of the gate, then N of up.
    ONE_ROW: block b is slot b alone, for few tokens; otherwise its slots stand in slot_of_row.
    """
    program = tl.program_id(0)
    columns = tl.cdiv(N, BLOCK_N)
    # Blocks of one expert stand side by side and share a column's weights while these are in the L2 cache.
    band = program // (GROUP_M * columns)
    height = min(blocks - band * GROUP_M, GROUP_M)
    within = program - band * GROUP_M * columns
    block = band * GROUP_M + within % height
    column = within // height

    expert = tl.load(expert_of_block_ptr + block).to(tl.int64)
    if expert < 0:
        return
    lane = tl.arange(0, BLOCK_M)
    if ONE_ROW:
        slot = tl.where(lane == 0, block, -1).to(tl.int64)
        source = tl.zeros([BLOCK_M], tl.int64) + block // slots_per_row
    else:
        slot = tl.load(slot_of_row_ptr + block.to(tl.int64) * BLOCK_M + lane).to(tl.int64)
        # A padding row reads row 0, and is not stored: loads without a mask are what the pipeline is fed by.
        source = tl.where(slot < 0, 0, slot) // slots_per_row
    n = column.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_range = n < N
    row_start = tl.where(in_range, n, 0) * K
    q_rows = q_ptr + (source * q_row_stride)[:, None]
    w_ptr += expert * w_expert_stride

    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    acc_up = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    up_ptr = w_ptr + tl.cast(N, tl.int64) * K
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        q = _activation_tile(q_rows, k, K, EVEN_K)
        acc = tl.dot(q, _weight_tile(w_ptr, row_start, k, K, EVEN_K), acc)
        if GATED:
            acc_up = tl.dot(q, _weight_tile(up_ptr, row_start, k, K, EVEN_K), acc_up)

    row_scale = tl.load(row_scale_ptr + source)
    halves = 2 if GATED else 1
    at = expert * (N * halves) + n
    d = _dequantize(acc, row_scale, w_scale_ptr, bias_ptr, at, in_range, HAS_BIAS)
    if ACTIVATION != "":
        up = d
        if GATED:
            up = _dequantize(acc_up, row_scale, w_scale_ptr, bias_ptr, at + N, in_range, HAS_BIAS)
        d = activate(d, up, alpha, limit, ACTIVATION)
    offsets = (slot * N)[:, None] + n[None, :]
    tl.store(out_ptr + offsets, d, mask=(slot >= 0)[:, None] & in_range[None, :])
