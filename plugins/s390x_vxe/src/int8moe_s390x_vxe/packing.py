"""The layout ``i8_n16k4`` in plain torch: the oracle of the native packer.

One matrix ``[N, K]`` int8 becomes panels ``[ceil(N/16)][ceil64(K)/4][16][4]`` of the same bytes; a gated w13 is two
such matrices (gate, up), one after the other. Padding holds 0.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

COLUMNS, DEPTH, DEPTH_UNIT = 16, 4, 64


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def packed_nbytes(halves: int, rows: int, depth: int) -> int:
    """Bytes of one expert's packed matrix of ``halves`` times ``rows`` output channels."""
    return halves * _round_up(rows, COLUMNS) * _round_up(depth, DEPTH_UNIT)


def pack(weight: Tensor, halves: int = 1) -> Tensor:
    """Canonical int8 ``[E, halves * rows, K]`` -> uint8 ``[E, packed_nbytes]``."""
    experts, all_rows, depth = weight.shape
    rows = all_rows // halves
    wide, deep = _round_up(rows, COLUMNS), _round_up(depth, DEPTH_UNIT)
    padded = pad(weight.reshape(experts, halves, rows, depth), (0, deep - depth, 0, wide - rows))
    panels = padded.view(experts, halves, wide // COLUMNS, COLUMNS, deep // DEPTH, DEPTH)
    return panels.transpose(3, 4).reshape(experts, -1).view(torch.uint8)


def unpack(packed: Tensor, halves: int, rows: int, depth: int) -> Tensor:
    """Uint8 ``[E, packed_nbytes]`` -> canonical int8 ``[E, halves * rows, depth]``."""
    experts, deep = packed.shape[0], _round_up(depth, DEPTH_UNIT)
    panels = packed.view(torch.int8).view(experts, halves, -1, deep // DEPTH, COLUMNS, DEPTH)
    padded = panels.transpose(3, 4).reshape(experts, halves, -1, deep)
    return padded[:, :, :rows, :depth].reshape(experts, halves * rows, depth)
