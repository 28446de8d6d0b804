"""Steps 8 and 9: a token's rows, weighted and summed in ascending global expert id, and rounded once."""

import triton
import triton.language as tl

from .formats import narrow

LAST_ID = tl.constexpr(0x7FFFFFFFFFFFFFFF)


@triton.jit(
    do_not_specialize=[
        "ids_token_stride",
        "ids_slot_stride",
        "weights_token_stride",
        "weights_slot_stride",
        "tokens",
        "top_k",
    ]
)
def combine(
    y_ptr,
    ids_ptr,
    ids_token_stride,
    ids_slot_stride,
    expert_of_slot_ptr,
    weights_ptr,
    weights_token_stride,
    weights_slot_stride,
    out_ptr,
    tokens,
    columns,
    top_k,
    FORMAT: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Y fp32 ``[M * k, columns]`` -> out ``[M, columns]``; slots of expert -1 are left out, never multiplied by 0.

    HAS_WEIGHT is off where the router weight was applied on the input. ROWS tokens a program.
    """
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = token < tokens
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = live[:, None] & (column < columns)[None, :]
    # Ids are compared among global ones; equal ids go by slot, and so does what stands beyond top_k.
    slot = tl.arange(0, SLOTS)
    id_offsets = (token * ids_token_stride)[:, None] + (slot.to(tl.int64) * ids_slot_stride)[None, :]
    inside = (slot < top_k)[None, :]
    ids = tl.load(ids_ptr + id_offsets, mask=live[:, None] & inside, other=0).to(tl.int64)
    ids = tl.where(inside, ids, LAST_ID)
    rank = tl.zeros([ROWS, SLOTS], tl.int32)
    other_offsets = token * ids_token_stride
    for other in range(0, top_k):
        others = tl.load(ids_ptr + other_offsets, mask=live, other=0).to(tl.int64)[:, None]
        before = (others < ids) | ((others == ids) & (slot > other)[None, :])
        rank += before.to(tl.int32)
        other_offsets += ids_slot_stride
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    for place in range(0, top_k):
        now = tl.sum(tl.where(rank == place, slot[None, :], 0), axis=1)
        row = token * top_k + now
        present = tl.load(expert_of_slot_ptr + row, mask=live, other=-1) >= 0
        # An absent slot's row was never written; whatever is there is not used.
        y = tl.load(y_ptr + (row * columns)[:, None] + column[None, :], mask=mask, other=0.0)
        if HAS_WEIGHT:
            at = token * weights_token_stride + now.to(tl.int64) * weights_slot_stride
            y = tl.load(weights_ptr + at, mask=live, other=0.0)[:, None] * y
        total = tl.where(present[:, None], total + y, total)
    tl.store(out_ptr + (token * columns)[:, None] + column[None, :], narrow(total, FORMAT), mask=mask)
