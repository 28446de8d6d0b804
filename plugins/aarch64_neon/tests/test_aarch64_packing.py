"""The layout in plain torch; that the native packer gives its bytes is tested where there is one."""

from __future__ import annotations

import pytest
import torch

from int8moe.native import LibraryUnavailable
from int8moe.native.abi import PACK_CALL
from int8moe_aarch64_neon import packing
from int8moe_aarch64_neon.library import LIBRARY

SHAPES = [(1, 1), (7, 64), (8, 63), (8, 64), (9, 65), (48, 128), (100, 100), (33, 2)]


@pytest.fixture
def native():
    try:
        return LIBRARY.load()
    except LibraryUnavailable as error:
        pytest.skip(str(error))


def test_where_each_weight_stands() -> None:
    """By the formula of the README: panel, group of depths, column, depth."""
    rows, depth = 20, 70
    weight = torch.randint(-128, 128, (2, 2 * rows, depth), dtype=torch.int8)
    packed = packing.pack(weight, halves=2).view(torch.int8)
    assert packed.shape == (2, 2 * 24 * 128)
    expected = torch.zeros_like(packed)
    for half in range(2):
        for n in range(rows):
            for k in range(depth):
                at = half * 24 * 128 + n // 8 * 8 * 128 + k // 8 * 64 + n % 8 * 8 + k % 8
                expected[:, at] = weight[:, half * rows + n, k]
    assert torch.equal(packed, expected), "padding is zero"


@pytest.mark.parametrize("halves", [1, 2])
@pytest.mark.parametrize(("rows", "depth"), SHAPES)
def test_oracle_round_trip(rows: int, depth: int, halves: int) -> None:
    weight = torch.randint(-128, 128, (2, halves * rows, depth), dtype=torch.int8)
    packed = packing.pack(weight, halves)
    assert packed.dtype == torch.uint8
    assert packed.shape == (2, packing.packed_nbytes(halves, rows, depth))
    assert torch.equal(packing.unpack(packed, halves, rows, depth), weight)


def test_shapes_without_padding_keep_their_size() -> None:
    assert packing.packed_nbytes(2, 768, 2048) == 2 * 768 * 2048
    assert packing.packed_nbytes(1, 9, 65) == 16 * 128


@pytest.mark.parametrize("halves", [1, 2])
@pytest.mark.parametrize(("rows", "depth"), SHAPES)
def test_native_packer_equals_the_oracle(native, rows: int, depth: int, halves: int) -> None:
    weight = torch.randint(-128, 128, (3, halves * rows, depth), dtype=torch.int8)
    expected = packing.pack(weight, halves)
    assert native.int8moe_packed_bytes(halves, rows, depth) == expected.shape[1]
    storage = torch.full((3, expected.shape[1] + 64), 0xAB, dtype=torch.uint8)  # a wider stride than needed
    storage[:, : halves * rows * depth] = weight.view(torch.uint8).reshape(3, -1)
    call = PACK_CALL.pack(PACK_CALL.size, 2, storage.data_ptr(), storage.stride(0), 3, halves, rows, depth)
    assert native.int8moe_pack(call) == 0
    assert torch.equal(storage[:, : expected.shape[1]], expected), "padding is written, never left"
    assert (storage[:, expected.shape[1] :] == 0xAB).all(), "nothing beyond an expert's bytes is touched"
    assert native.int8moe_unpack(call) == 0
    assert torch.equal(storage[:, : halves * rows * depth].view(torch.int8).reshape(3, halves * rows, depth), weight)
