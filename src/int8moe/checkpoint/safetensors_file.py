"""Writes safetensors files tensor by tensor: the header first, as every shape is known, then the bytes in order.

The library of the format writes whole dicts of tensors from memory, and cannot say where the data begins.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import torch
from torch import Tensor

from .files import ITEM_BITS

PARTIAL = ".partial"
"""How the names of files end that are still being written."""

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class TensorSpec(NamedTuple):
    """One tensor of a file that is yet to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def item_bits(self) -> int:
        """Bits of one element."""
        return ITEM_BITS[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return math.prod(self.shape) * self.item_bits // 8


def make_header(tensors: Sequence[TensorSpec], metadata: Mapping[str, str], *, align: int = 8) -> bytes:
    """Length and header of a file, padded with spaces so that the data starts at a multiple of ``align`` bytes."""
    fields: dict[str, object] = {"__metadata__": dict(metadata)}
    start = 0
    for tensor in tensors:
        stop = start + tensor.nbytes
        fields[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % align)
    return len(text).to_bytes(8, "little") + text


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, which has to outlive the view."""
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError("only the memory of contiguous CPU tensors can be viewed")
    count = tensor.numel() * tensor.element_size()
    if count == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * count).from_address(tensor.data_ptr())).cast("B")


@contextlib.contextmanager
def written_whole(file: Path) -> Iterator[IO[bytes]]:
    """A stream whose bytes become ``file`` at the end of the block, all of them or, after an error, none.

    They are written beside it under a name of their own, so that several processes may do it at once.
    """
    partial = file.with_name(f".{file.name}.{secrets.token_hex(6)}{PARTIAL}")
    try:
        with partial.open("xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(file)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
