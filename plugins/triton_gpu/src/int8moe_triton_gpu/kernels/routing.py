"""Which expert serves which slot, and blocks of slots of one expert: all on the device, without a look from the host.

A slot is token * top_k + position. Blocks hold BLOCK_M slots of one expert, the last one of an expert padded with -1.
The order of an expert's slots is left to the atomics: a row's bits do not depend on its place.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["ids_token_stride", "ids_slot_stride", "slots", "top_k", "num_experts", "local_experts"])
def place_experts(
    ids_ptr,
    ids_token_stride,
    ids_slot_stride,
    map_ptr,
    expert_of_slot_ptr,
    counts_ptr,
    slots,
    top_k,
    num_experts,
    local_experts,
    HAS_MAP: tl.constexpr,
    COUNT: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """topk_ids ``[M, k]`` -> expert_of_slot int32 ``[M * k]``: the local expert, or -1 for a slot that is left out.

    COUNT: counts int32 ``[local_experts]`` (zeros) get how many slots each expert has.
    """
    slot = tl.program_id(0).to(tl.int64) * SLOTS + tl.arange(0, SLOTS)
    live = slot < slots
    token = slot // top_k
    place = slot - token * top_k
    # 64 bits until the range is checked: cut to 32, a large id would name an expert.
    expert = tl.load(ids_ptr + token * ids_token_stride + place * ids_slot_stride, mask=live, other=-1).to(tl.int64)
    known = live & (expert >= 0) & (expert < num_experts)
    if HAS_MAP:
        expert = tl.load(map_ptr + expert, mask=known, other=-1).to(tl.int64)
        known = known & (expert >= 0) & (expert < local_experts)
    local = tl.where(known, expert, -1).to(tl.int32)
    tl.store(expert_of_slot_ptr + slot, local, mask=live)
    if COUNT:
        tl.atomic_add(counts_ptr + local, 1, mask=known)


@triton.jit(do_not_specialize=["blocks", "local_experts"])
def lay_out_blocks(
    counts_ptr,
    next_row_ptr,
    expert_of_block_ptr,
    blocks,
    local_experts,
    BLOCK_M: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Name each block's expert, -1 beyond the last, and say where an expert's first row is.

    counts int32 ``[local_experts]`` -> next_row int32 ``[local_experts]``, expert_of_block int32 ``[blocks]``.
    """
    expert = tl.arange(0, EXPERTS)
    counts = tl.load(counts_ptr + expert, mask=expert < local_experts, other=0)
    needed = (counts + (BLOCK_M - 1)) // BLOCK_M
    ends = tl.cumsum(needed, axis=0)
    if tl.program_id(0) == 0:
        tl.store(next_row_ptr + expert, (ends - needed) * BLOCK_M, mask=expert < local_experts)
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    ended = tl.sum((ends[None, :] <= block[:, None]).to(tl.int32), axis=1)
    tl.store(expert_of_block_ptr + block, tl.where(ended < local_experts, ended, -1), mask=block < blocks)


@triton.jit(do_not_specialize=["slots"])
def place_slots(expert_of_slot_ptr, next_row_ptr, slot_of_row_ptr, slots, SLOTS: tl.constexpr):
    """Give each slot the next row of its expert's blocks: slot_of_row int32, -1 before. next_row is used up."""
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    expert = tl.load(expert_of_slot_ptr + slot, mask=slot < slots, other=-1)
    row = tl.atomic_add(next_row_ptr + expert, 1, mask=expert >= 0)
    tl.store(slot_of_row_ptr + row, slot, mask=expert >= 0)
