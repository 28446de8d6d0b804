"""What says that a file of a checkpoint is the same as before, without reading its data. Imports no torch."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from ..errors import CheckpointError
from .files import open_regular, read_bytes

Stamp = list[int | str]
"""Size, times of change in ns (mtime, ctime), inode, sha256 of the safetensors header; a list, as JSON gives it back.

Anybody can set the mtime, and tools that copy or synchronise do. The ctime is the system's own.
"""


def numbers(status: os.stat_result) -> tuple[int, int, int, int]:
    """Size, mtime, ctime (both in ns) and inode: what of a file's status changes when somebody writes to it."""
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


class Stamps:
    """Stamps of files; the header of each is read once, as one file may hold many layers."""

    def __init__(self) -> None:
        self._headers: dict[tuple[str | int, ...], str] = {}

    def of(self, file: Path) -> Stamp:
        """The stamp of a safetensors file; CheckpointError when it cannot be read."""
        try:
            found = numbers(file.stat())
            known = (str(file), *found)
            if known not in self._headers:
                with open_regular(file) as stream:
                    header = stream.read(int.from_bytes(stream.read(8), "little"))
                self._headers[known] = hashlib.sha256(header).hexdigest()
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from None
        return [*found, self._headers[known]]


def content_digest(file: Path) -> str:
    """The sha256 of a small file; CheckpointError when it cannot be read."""
    try:
        return hashlib.sha256(read_bytes(file)).hexdigest()
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from None
