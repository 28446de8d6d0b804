from __future__ import annotations

import pytest
import torch
from packed_layer import make_layer

from int8moe.contracts import MoEConfig
from int8moe.native.abi import PACK_CALL
from int8moe_x86_vnni import packing

SHAPES = [(1, 1), (15, 64), (16, 63), (16, 64), (17, 65), (48, 128), (100, 100), (33, 2)]


@pytest.mark.parametrize("halves", [1, 2])
@pytest.mark.parametrize(("rows", "depth"), SHAPES)
def test_native_packer_equals_the_oracle(native, rows: int, depth: int, halves: int) -> None:
    weight = torch.randint(-128, 128, (3, halves * rows, depth), dtype=torch.int8)
    expected = packing.pack(weight, halves)
    assert expected.shape[1] == packing.packed_nbytes(halves, rows, depth)
    assert native.int8moe_packed_bytes(halves, rows, depth) == expected.shape[1]

    storage = torch.full((3, expected.shape[1] + 64), 0xAB, dtype=torch.uint8)  # a wider stride than needed
    storage[:, : halves * rows * depth] = weight.view(torch.uint8).reshape(3, -1)
    call = PACK_CALL.pack(PACK_CALL.size, 2, storage.data_ptr(), storage.stride(0), 3, halves, rows, depth)
    assert native.int8moe_pack(call) == 0
    assert torch.equal(storage[:, : expected.shape[1]], expected), "padding is written, never left"
    assert (storage[:, expected.shape[1] :] == 0xAB).all(), "nothing beyond an expert's bytes is touched"

    assert native.int8moe_unpack(call) == 0
    assert torch.equal(storage[:, : halves * rows * depth].view(torch.int8).reshape(3, halves * rows, depth), weight)


@pytest.mark.parametrize(("rows", "depth"), SHAPES)
def test_oracle_round_trip(rows: int, depth: int) -> None:
    weight = torch.randint(-128, 128, (2, 2 * rows, depth), dtype=torch.int8)
    assert torch.equal(packing.unpack(packing.pack(weight, 2), 2, rows, depth), weight)


def test_storage_that_is_too_small_is_refused(native) -> None:
    storage = torch.zeros(2, 64, dtype=torch.uint8)
    call = PACK_CALL.pack(PACK_CALL.size, 1, storage.data_ptr(), 64, 2, 1, 16, 64)
    assert native.int8moe_pack(call) != 0


@pytest.mark.parametrize(("hidden", "inner"), [(128, 64), (70, 33)])
def test_layer_is_packed_in_its_own_storage_and_restored(kernel, hidden: int, inner: int) -> None:
    config = MoEConfig(num_experts=3, top_k=2, hidden_size=hidden, intermediate_size=inner)
    layer = make_layer(kernel, config)
    weights = layer.weights
    sizes = kernel.packed_expert_nbytes(config)
    assert layer.layout.name == "u8_n16k4"
    assert layer.layout.nbytes == 3 * sum(sizes)
    assert torch.equal(weights.w13_weight[:, : sizes[0]], packing.pack(layer.values["w13_weight"], 2))
    assert torch.equal(weights.w2_weight[:, : sizes[1]], packing.pack(layer.values["w2_weight"]))
    places = weights.w13_weight.data_ptr(), weights.w2_weight.data_ptr()
    kernel.restore_weights(weights)
    assert torch.equal(weights.w13_weight, layer.values["w13_weight"])
    assert torch.equal(weights.w2_weight, layer.values["w2_weight"])
    assert (weights.w13_weight.data_ptr(), weights.w2_weight.data_ptr()) == places
