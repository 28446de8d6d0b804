"""One packed layer in a safetensors file: the layer's state_dict, what it was made from, and digests of all bytes.

The header is padded so that the data starts at a multiple of 4096. Its ``__metadata__`` holds

    identity       what the bytes are: layout tag, sizes, source files; see :mod:`.packed_cache`
    extra_state    the layer's own: state, layout and expert strides
    digests        xxh3_64 of each tensor, in pieces of PIECE_BYTES
    header         xxh3_128 of all of the above and of the tensors' names, dtypes and shapes
"""

from __future__ import annotations

import json
import mmap
import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from ..host import this_host
from .files import MAX_HEADER_BYTES
from .safetensors_file import DTYPE_NAMES, DTYPES, TensorSpec, make_header, tensor_bytes, written_whole

ALIGNMENT = 4096
PIECE_BYTES = 4 << 20
"""What one thread reads at a time, and what has a digest of its own."""

_WEIGHT_ALIGNMENT = 64  # that of a layer's own storage
_CACHED_BYTES = 2 << 20
"""Read and digested at a time, so that the digest finds the bytes in a cache. A huge page: the first byte that is read
into one zeroes the whole of it, and the rest is then filled while that is in a cache, too."""


class DamagedFile(Exception):
    """The bytes are not those that were written; the text is the rest of a sentence about the file."""


class _Stored(NamedTuple):
    spec: TensorSpec
    offset: int
    """From the start of the file."""


def write_packed(
    file: Path, tensors: Mapping[str, Tensor], identity: Mapping[str, Any], extra_state: Mapping[str, Any]
) -> int:
    """Write a layer's tensors, whole or not at all; the largest lie first, where that leaves each aligned to its type.

    Returns:
        Bytes of the file.

    Raises:
        OSError: the folder cannot be written to, or has no room.
    """
    whole = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    ordered = sorted(whole.items(), key=lambda item: (-item[1].numel() * item[1].element_size(), item[0]))
    if any(before.numel() * before.element_size() % 8 for _, before in ordered[:-1]):
        ordered.sort(key=lambda item: -item[1].element_size())
    specs = [TensorSpec(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in ordered]
    file.parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(this_host().num_threads) as pool, written_whole(file) as stream:
        digests = {name: list(pool.map(xxhash.xxh3_64_hexdigest, _pieces(tensor))) for name, tensor in ordered}
        metadata = {
            "identity": json.dumps(identity, sort_keys=True),
            "extra_state": json.dumps(extra_state, sort_keys=True),
            "digests": json.dumps(digests, sort_keys=True),
        }
        metadata["header"] = _header_digest(metadata, specs)
        header = make_header(specs, metadata, align=ALIGNMENT)
        stream.write(header)
        for _, tensor in ordered:
            for piece in _pieces(tensor):
                stream.write(piece)
    return len(header) + sum(spec.nbytes for spec in specs)


class PackedFile:
    """A packed file that is open: its header is checked, its tensors can be read in parallel.

    Attributes:
        identity: what the bytes are.
        extra_state: as the state_dict has it.
        nbytes: of the whole file.
        status: as the system had it when the file was opened.
        check_digests: whether reading a tensor checks its digests.

    Raises:
        FileNotFoundError: there is none.
        DamagedFile: the header is not what was written, or the file is not as long as it says.
    """

    def __init__(self, file: Path) -> None:
        self._descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        self._seek_lock = threading.Lock()
        self._mapping: mmap.mmap | None = None
        try:
            self.status = self.current_status()
            self.nbytes = self.status.st_size
            self.check_digests = True
            self._read_header()
            self._pool = ThreadPoolExecutor(this_host().num_threads)
        except BaseException:
            os.close(self._descriptor)
            raise

    def __enter__(self) -> PackedFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown()
        os.close(self._descriptor)

    def current_status(self) -> os.stat_result:
        """The open file's status now."""
        return os.fstat(self._descriptor)

    def meta_tensors(self) -> dict[str, Tensor]:
        """The shapes and dtypes of what is stored, by name."""
        return {
            name: torch.empty(stored.spec.shape, dtype=DTYPES[stored.spec.dtype], device="meta")
            for name, stored in self._tensors.items()
        }

    def read_into(self, name: str, target: Tensor) -> None:
        """Read one tensor into ``target``, of the same shape and dtype.

        Raises:
            DamagedFile: its bytes are not those that were written (with ``check_digests``).
        """
        if not target.is_contiguous() or target.device.type != "cpu":
            room = torch.empty(target.shape, dtype=target.dtype, device="cpu")
            self.read_into(name, room)
            target.copy_(room)
            return
        offset, digests = self._tensors[name].offset, self._digests[name]

        def read_piece(index: int) -> None:
            start = index * PIECE_BYTES
            piece = view[start : start + PIECE_BYTES]
            digest = xxhash.xxh3_64()
            for at in range(0, len(piece), _CACHED_BYTES):
                part = piece[at : at + _CACHED_BYTES]
                self._read_at(offset + start + at, part)
                if self.check_digests:
                    digest.update(part)
            if self.check_digests and digest.hexdigest() != digests[index]:
                raise DamagedFile(f"holds other bytes than were written, in {name}")

        view = tensor_bytes(target)
        for _ in self._pool.map(read_piece, range(len(digests))):
            pass

    def map(self, name: str) -> Tensor | None:
        """One tensor as a view of the mapped file, unread; None where it does not start at a multiple of 64 bytes.

        The mapping is private: what is written to the tensor is copied, page by page, and the file stays as it is.
        """
        spec, offset = self._tensors[name]
        if offset % _WEIGHT_ALIGNMENT or not spec.nbytes:
            return None
        if self._mapping is None:
            self._mapping = mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_COPY)
        flat = torch.frombuffer(self._mapping, dtype=torch.uint8, count=spec.nbytes, offset=offset)
        return flat.view(DTYPES[spec.dtype]).view(spec.shape)

    def _read_at(self, offset: int, part: memoryview) -> None:
        done = 0
        while done < len(part):
            if hasattr(os, "preadv"):
                count = os.preadv(self._descriptor, [part[done:]], offset + done)
            else:  # this system has one file position for all threads
                with self._seek_lock:
                    os.lseek(self._descriptor, offset + done, os.SEEK_SET)
                    data = os.read(self._descriptor, len(part) - done)
                count = len(data)
                part[done : done + count] = data
            if count == 0:
                raise DamagedFile("is truncated")
            done += count

    def _read_header(self) -> None:
        prefix = os.read(self._descriptor, 8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(self.nbytes - 8, MAX_HEADER_BYTES):
            raise DamagedFile("is truncated, or no packed layer")
        raw = bytearray(length)
        self._read_at(8, memoryview(raw))
        try:
            fields = json.loads(raw)
            metadata = fields.pop("__metadata__")
            specs = {
                name: (TensorSpec(name, field["dtype"], tuple(field["shape"])), field["data_offsets"])
                for name, field in fields.items()
            }
            if metadata.pop("header") != _header_digest(metadata, [spec for spec, _ in specs.values()]):
                raise DamagedFile("has a header that was changed")
            self.identity: dict[str, Any] = json.loads(metadata["identity"])
            self.extra_state: dict[str, Any] = json.loads(metadata["extra_state"])
            self._digests: dict[str, list[str]] = json.loads(metadata["digests"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise DamagedFile("has a header that is not a packed layer's") from None
        self._tensors: dict[str, _Stored] = {}
        end = 0
        for name, (spec, offsets) in specs.items():
            if offsets != [end, end + spec.nbytes] or len(self._digests[name]) != -(-spec.nbytes // PIECE_BYTES):
                raise DamagedFile("has a header that was changed")
            self._tensors[name] = _Stored(spec, 8 + length + end)
            end += spec.nbytes
        if self.nbytes != 8 + length + end:
            raise DamagedFile(f"has {self.nbytes} bytes, and its header says {8 + length + end}")


def _header_digest(metadata: Mapping[str, str], specs: list[TensorSpec]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps([metadata, specs], sort_keys=True).encode())


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    data = tensor_bytes(tensor)
    return (data[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES))
