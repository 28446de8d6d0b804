"""The oracle of the native packer; the packer itself is compared with it where it runs, in emulated/check_cases.py."""

from __future__ import annotations

import pytest
import torch

from int8moe_s390x_vxe import packing


@pytest.mark.parametrize("halves", [1, 2])
@pytest.mark.parametrize(
    ("rows", "depth"), [(1, 1), (15, 64), (16, 63), (16, 64), (17, 65), (48, 128), (100, 100), (33, 2)]
)
def test_round_trip(rows: int, depth: int, halves: int) -> None:
    weight = torch.randint(-128, 128, (3, halves * rows, depth), dtype=torch.int8)
    packed = packing.pack(weight, halves)
    assert packed.dtype == torch.uint8
    assert packed.shape == (3, packing.packed_nbytes(halves, rows, depth))
    assert torch.equal(packing.unpack(packed, halves, rows, depth), weight)


def test_the_place_of_each_weight() -> None:
    """[half][N / 16][K / 4][16 columns][4 depths], zeros where there is no weight."""
    weight = torch.arange(2 * 18 * 6, dtype=torch.int16).remainder(120).add(1).to(torch.int8).view(1, 36, 6)
    panels = packing.pack(weight, 2).view(torch.int8).view(2, 2, 16, 16, 4)
    for half, column, k in ((0, 0, 0), (0, 17, 5), (1, 3, 4), (1, 16, 2)):
        assert panels[half, column // 16, k // 4, column % 16, k % 4] == weight[0, half * 18 + column, k]
    assert panels[:, 1, :, 2:].count_nonzero() == 0
    assert panels[:, :, 2:].count_nonzero() == 0
    assert panels[:, :, 1, :, 2:].count_nonzero() == 0
    assert panels.count_nonzero() == weight.numel()
