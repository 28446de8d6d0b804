"""Checks tiers bit for bit against the file of write_cases.py, through the C interface, with numpy and without torch.

    python check_cases.py FILE.npz TIER...

The calls of a layer come in turns as they are, in chunks of one token, on three workers, and from strided rows. Prints a
line for each fault and one for each tier; exits 1 when there was a fault.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from int8moe.contracts import ACTIVATIONS
from int8moe.native import abi
from int8moe_s390x_vxe.library import LIBRARY

Array = np.ndarray

# Exponent bits of each float format: above them as an integer is NaN.
INFINITY = {abi.F32: 0x7F800000, abi.BF16: 0x7F80, abi.F16: 0x7C00}

_TASK = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
_PARALLEL_FOR = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, _TASK, ctypes.c_void_p)
_COUNT = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.POINTER(ctypes.c_uint32))


@_PARALLEL_FOR
def _parallel_for(begin: int, end: int, grain: int, task: Any, context: int) -> int:
    """Workers one after another, the last first: the driver promises the same bits for any order."""
    for worker in reversed(range(begin, end)):
        task(worker, worker + 1, context)
    return 0


@_COUNT
def _three(count: Any) -> int:
    count[0] = 3
    return 0


class Way(NamedTuple):
    """How a call is made."""

    name: str
    scratch: int = 0  # limit in bytes; 0 = the default
    workers: int = 1
    stride: int = 1


WAYS = (Way("as it is"), Way("chunks", scratch=1), Way("workers", workers=3), Way("strided", stride=3))


def address(array: Array | None) -> int:
    """Of the first element; 0 for None."""
    return 0 if array is None else array.ctypes.data


def native(array: Array) -> Array:
    """In the byte order of this machine, contiguous."""
    return np.ascontiguousarray(array.astype(array.dtype.newbyteorder("=")))


def spread(array: Array, stride: int) -> Array:
    """The same elements, ``stride`` apart, among others that must not be read."""
    if stride == 1:
        return array
    wide = np.full((*array.shape[:-1], array.shape[-1] * stride), 77, dtype=array.dtype)
    wide[..., ::stride] = array
    return wide[..., ::stride]


def strides(array: Array) -> tuple[int, ...]:
    """In elements."""
    return tuple(stride // array.itemsize for stride in array.strides)


class Packed:
    """One matrix of every expert, packed in storage of its own, between bytes that are no one's."""

    def __init__(self, library: ctypes.CDLL, weight: Array, halves: int) -> None:
        experts, all_rows, depth = weight.shape
        rows = all_rows // halves
        self._library, self._canonical = library, weight.view(np.uint8).reshape(experts, -1)
        self.nbytes = library.int8moe_packed_bytes(halves, rows, depth)
        self.stride = max(self.nbytes, all_rows * depth) + 64
        self.storage = np.full((experts, self.stride), 0xAB, dtype=np.uint8)
        self.storage[:, : all_rows * depth] = self._canonical
        self._call = abi.PACK_CALL.pack(
            abi.PACK_CALL.size, 3, address(self.storage), self.stride, experts, halves, rows, depth
        )
        LIBRARY.check(library.int8moe_pack(self._call), "packing")

    def equals(self, oracle: Array) -> bool:
        """Whether these are the bytes of packing.py, padding included, and nothing was written beyond."""
        beyond = self.storage[:, max(self.nbytes, self._canonical.shape[1]) :]
        return self.nbytes == oracle.shape[1] and bool(
            (self.storage[:, : self.nbytes] == oracle).all() and (beyond == 0xAB).all()
        )

    def unpacks(self) -> bool:
        """Whether unpacking gives the weights back."""
        LIBRARY.check(self._library.int8moe_unpack(self._call), "unpacking")
        return bool((self.storage[:, : self._canonical.shape[1]] == self._canonical).all())


class Layer:
    """One layer of the file, packed."""

    def __init__(self, library: ctypes.CDLL, tier: str, entry: dict[str, Any], tensors: dict[str, Array]) -> None:
        self.library, self.config, self.tensors = library, entry["config"], tensors
        config = self.config
        self.hidden = config["hidden_size"]
        gated = not config["activation"].endswith("_no_mul")
        self.w13 = Packed(library, tensors["w13_weight"], 2 if gated else 1)
        self.w2 = Packed(library, tensors["w2_weight"], 1)
        names = ("w13_weight_scale", "w2_weight_scale", "w13_bias", "w2_bias", "expert_map")
        self.descriptor = abi.LAYER.pack(
            abi.LAYER.size, abi.DRIVER_VERSION, LIBRARY.tier_index(tier), ACTIVATIONS.index(config["activation"]),
            config["num_experts"], len(tensors["w2_weight"]), self.hidden, config["intermediate_size"],
            address(self.w13.storage), self.w13.stride, address(self.w2.storage), self.w2.stride,
            *(address(tensors.get(name)) for name in names),
            config["swiglu_alpha"], config["swiglu_limit"], int(config["apply_router_weight_on_input"]), 0,
        )  # fmt: skip

    def forward(self, codes: dict[str, int], call: dict[str, Array], way: Way) -> Array:
        """Make one call; returns what it wrote."""
        library = self.library
        library.int8moe_set_scratch_limit(way.scratch)
        if way.workers > 1:
            library.int8moe_set_parallel(*(ctypes.cast(f, ctypes.c_void_p).value for f in (_parallel_for, _three)))
        else:
            library.int8moe_set_parallel(None, None)
        x, out = spread(call["x"], way.stride), np.full_like(call["expected"], 77)
        if "counts" in call:
            scales, counts = call.get("scales"), spread(call["counts"], way.stride)
            status = library.int8moe_forward_rows(
                self.descriptor,
                abi.ROWS_CALL.pack(
                    abi.ROWS_CALL.size, way.workers, len(x), address(x), *strides(x), address(scales), 1,
                    address(counts), *strides(counts), address(out), codes["x"], codes["counts"],
                ),
            )  # fmt: skip
        else:
            weights, ids = spread(call["weights"], way.stride), spread(call["ids"], way.stride)
            status = library.int8moe_forward(
                self.descriptor,
                abi.CALL.pack(
                    abi.CALL.size, way.workers, *ids.shape, address(x), *strides(x), address(weights),
                    *strides(weights), address(ids), *strides(ids), address(out), codes["x"], codes["weights"],
                    codes["ids"], 0,
                ),
            )  # fmt: skip
        LIBRARY.check(status, "a call")
        return out


def first_difference(found: Array, expected: Array, code: int) -> str | None:
    """Where two outputs differ in their bits (any NaN equals any NaN); None where they do not."""
    kind = np.uint32 if code == abi.F32 else np.uint16
    a, b = found.view(kind), expected.view(kind)
    magnitude = kind(0x7FFFFFFF if code == abi.F32 else 0x7FFF)
    both_nan = ((a & magnitude) > INFINITY[code]) & ((b & magnitude) > INFINITY[code])
    wrong = np.argwhere((a != b) & ~both_nan)
    if not len(wrong):
        return None
    row, column = wrong[0]
    return f"row {row} column {column}: found {a[row, column]:#x}, expected {b[row, column]:#x} ({len(wrong)} differ)"


def faults(library: ctypes.CDLL, tier: str, file: Any, counted: list[int]) -> Iterator[str]:
    """Check every layer of the file; a line for each fault."""
    for number, entry in enumerate(json.loads(str(file["index"]))):
        tensors = {name: native(file[f"{number}/{name}"]) for name in entry["tensors"]}
        layer = Layer(library, tier, entry, tensors)
        if not (layer.w13.equals(tensors["w13_packed"]) and layer.w2.equals(tensors["w2_packed"])):
            yield f"{tier} {entry['name']}: packing does not give the bytes of packing.py"
        for position, codes in enumerate(entry["calls"]):
            call = {name: native(file[f"{number}/{position}/{name}"]) for name in codes}
            way = WAYS[(number + position) % len(WAYS)]
            out = layer.forward(codes, call, way)
            counted[0] += 1
            if difference := first_difference(out, call["expected"], codes["expected"]):
                yield f"{tier} {entry['name']}, call {position} {way.name}: {difference}"
        if not (layer.w13.unpacks() and layer.w2.unpacks()):
            yield f"{tier} {entry['name']}: unpacking does not give the weights back"


def main(path: str, tiers: list[str]) -> int:
    """Check the tiers; 0 when there is no fault."""
    library = LIBRARY.load()
    failed = False
    with np.load(path) as file:
        for tier in tiers:
            counted = [0]
            wrong = 0
            for fault in faults(library, tier, file, counted):
                wrong += 1
                print(fault)
            failed = failed or wrong > 0
            print(f"{tier}: {counted[0]} calls, {wrong} faults", flush=True)
    return int(failed)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1], sys.argv[2:]))
