"""Element offsets beyond 2^31, in memory that is reserved but hardly touched; numpy without torch.

    python check_offsets.py TIER...

Experts, rows of activations and routing lie gigabytes apart. The same layer close together gives the answer that the far
one has to give. Prints a line for each tier; exits 1 when one differs.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

import numpy as np

from int8moe.native import abi
from int8moe_s390x_vxe.library import LIBRARY

EXPERTS, TOKENS, HIDDEN, INNER = 3, 5, 128, 48
FAR = 2**31 + 4096  # bytes from one expert to the next; elements from one row of x to the next
NORESERVE = 0x4000  # MAP_NORESERVE


class Sparse:
    """Memory of the system that exists where it was written."""

    def __init__(self, nbytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
        self._map = mmap.mmap(-1, nbytes, flags=flags)
        self.bytes = np.frombuffer(self._map, dtype=np.uint8)
        self.address = self.bytes.ctypes.data

    def put(self, offset: int, array: np.ndarray) -> None:
        """Write an array's bytes."""
        self.bytes[offset : offset + array.nbytes] = array.reshape(-1).view(np.uint8)


def forward(library: ctypes.CDLL, tier: int, weight_stride: int | None, row_stride: int) -> np.ndarray:
    """The output of one fixed layer, with experts and rows this far apart (None: as close as they can be)."""
    random = np.random.default_rng(1)
    shapes = {"w13": (2, INNER, HIDDEN), "w2": (1, HIDDEN, INNER)}
    storage, strides = {}, {}
    for name, (halves, rows, depth) in shapes.items():
        stride = weight_stride or library.int8moe_packed_bytes(halves, rows, depth)
        storage[name], strides[name] = Sparse(stride * EXPERTS), stride
        for expert in range(EXPERTS):
            weight = random.integers(-128, 128, halves * rows * depth, dtype=np.int8)
            storage[name].put(expert * stride, weight)
        pack = abi.PACK_CALL.pack(abi.PACK_CALL.size, 1, storage[name].address, stride, EXPERTS, halves, rows, depth)
        LIBRARY.check(library.int8moe_pack(pack), "packing")
    w13_scale = (random.random((EXPERTS, 2 * INNER)) * 1e-3).astype(np.float32)
    w2_scale = (random.random((EXPERTS, HIDDEN)) * 1e-3).astype(np.float32)
    layer = abi.LAYER.pack(
        abi.LAYER.size, abi.DRIVER_VERSION, tier, 0, EXPERTS, EXPERTS, HIDDEN, INNER,
        storage["w13"].address, strides["w13"], storage["w2"].address, strides["w2"],
        w13_scale.ctypes.data, w2_scale.ctypes.data, 0, 0, 0, 1.702, 7.0, 0, 0,
    )  # fmt: skip
    x = random.standard_normal((TOKENS, HIDDEN)).astype(np.float32)
    weights = random.random((TOKENS, 2)).astype(np.float32)
    ids = random.integers(0, EXPERTS, (TOKENS, 2), dtype=np.int32)
    far = {}
    for name, array in {"x": x, "weights": weights, "ids": ids}.items():
        far[name] = Sparse(TOKENS * row_stride * 4)
        for row in range(TOKENS):
            far[name].put(row * row_stride * 4, array[row])
    out = np.zeros((TOKENS, HIDDEN), dtype=np.float32)
    call = abi.CALL.pack(
        abi.CALL.size, 1, TOKENS, 2, far["x"].address, row_stride, 1, far["weights"].address, row_stride, 1,
        far["ids"].address, row_stride, 1, out.ctypes.data, abi.F32, abi.F32, abi.I32, 0,
    )  # fmt: skip
    LIBRARY.check(library.int8moe_forward(layer, call), "a call")
    return out


def main(tiers: list[str]) -> int:
    """Compare; 0 when every tier gives the same bits."""
    library = LIBRARY.load()
    failed = False
    for tier in tiers:
        index = LIBRARY.tier_index(tier)
        near, far = forward(library, index, None, HIDDEN), forward(library, index, FAR, FAR)
        good = bool(np.isfinite(near).all() and near.any() and (near.view(np.uint32) == far.view(np.uint32)).all())
        failed = failed or not good
        print(f"{tier}: {'same bits' if good else 'other bits'} beyond 2^31")
    return int(failed)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1:]))
