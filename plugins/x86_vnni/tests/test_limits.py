"""What a benchmark asks of a kernel: how many multiply-adds it did, and that it can read a buffer of any size."""

from __future__ import annotations

import pytest
import torch

from int8moe_x86_vnni.library import LIBRARY


def test_peak_counts_the_multiply_adds_of_every_thread(kernel):
    once, thrice = kernel.run_peak(1), kernel.run_peak(3)
    assert once > 0
    assert thrice == 3 * once
    assert kernel.run_peak(0) == 0


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 4096, 100_003])
def test_every_byte_is_read(tier: str, native, nbytes: int):
    """The library returns the exclusive or of all words, so a byte that was left out would change it."""
    number = LIBRARY.tier_index(tier)
    buffer = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)

    def fold() -> int:
        return native.int8moe_read_memory(number, 2, buffer.data_ptr(), nbytes)

    before = fold()
    for position in {0, nbytes // 2, nbytes - 1} if nbytes else ():
        buffer[position] ^= 0x55
        after = fold()
        assert after != before, position
        before = after


def test_a_strided_buffer_is_refused(kernel):
    with pytest.raises(ValueError, match=r"contiguous buffer, got strides \(2,\)"):
        kernel.read_memory(torch.zeros(64, dtype=torch.uint8)[::2])
