"""The layout ``s8_n8k8`` in plain torch: the oracle of the native packer.

One matrix ``[N, K]`` int8 becomes panels ``[ceil(N/8)][ceil64(K)/8][8][8]`` of the weights as they are, as bytes; a
gated w13 is two such matrices (gate, up), one after the other. Padding holds 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

COLUMNS, DEPTH, DEPTH_UNIT = 8, 8, 64


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def packed_nbytes(halves: int, rows: int, depth: int) -> int:
    """Bytes of one expert's packed matrix of ``halves`` times ``rows`` output channels."""
    return halves * _round_up(rows, COLUMNS) * _round_up(depth, DEPTH_UNIT)


def pack(weight: Tensor, halves: int = 1) -> Tensor:
    """Canonical int8 ``[E, halves * rows, K]`` -> uint8 ``[E, packed_nbytes]``."""
    experts, all_rows, depth = weight.shape
    rows = all_rows // halves
    padded = torch.zeros((experts, halves, _round_up(rows, COLUMNS), _round_up(depth, DEPTH_UNIT)), dtype=torch.int8)
    padded[:, :, :rows, :depth] = weight.view(experts, halves, rows, depth)
    panels = padded.view(torch.uint8)
    panels = panels.view(experts, halves, padded.shape[2] // COLUMNS, COLUMNS, padded.shape[3] // DEPTH, DEPTH)
    return panels.transpose(3, 4).reshape(experts, -1)


def unpack(packed: Tensor, halves: int, rows: int, depth: int) -> Tensor:
    """Uint8 ``[E, packed_nbytes]`` -> canonical int8 ``[E, halves * rows, depth]``."""
    experts = packed.shape[0]
    panels = packed.view(experts, halves, -1, _round_up(depth, DEPTH_UNIT) // DEPTH, COLUMNS, DEPTH)
    padded = panels.transpose(3, 4).reshape(experts, halves, -1, _round_up(depth, DEPTH_UNIT))
    return padded[:, :, :rows, :depth].reshape(experts, halves * rows, depth).view(torch.int8)
