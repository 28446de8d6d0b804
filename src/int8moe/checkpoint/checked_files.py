"""Which files of a folder have been found whole, digest by digest, and were not written to since.

Digesting a packed layer costs about half as much as reading it. So a file is digested when it is read for the first
time, and again after every change: whoever writes to a file changes its ctime, which nobody can set. Notes lie in one
small file of the folder; without them, or with broken ones, everything is digested.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

from .safetensors_file import written_whole
from .stamps import numbers

NOTES = ".checked.json"

_SETTLED_NS = 2_000_000_000
"""A file whose ctime is younger is not noted: a clock of coarse ticks could give the same ctime to one more write."""


def _stamp(status: os.stat_result) -> list[int]:
    return [status.st_dev, *numbers(status)]


def is_checked(file: Path, status: os.stat_result) -> bool:
    """Whether the open file of this status is the one that was noted."""
    return _notes(file.parent).get(file.name) == _stamp(status)


def note_checked(file: Path, before: os.stat_result, after: os.stat_result) -> None:
    """Note that every digest of a file fitted, read between these two moments. A folder without room keeps no notes."""
    if _stamp(before) != _stamp(after) or time.time_ns() - after.st_ctime_ns < _SETTLED_NS:
        return
    notes = {name: stamp for name, stamp in _notes(file.parent).items() if (file.parent / name).exists()}
    with contextlib.suppress(OSError), written_whole(file.parent / NOTES) as stream:
        stream.write(json.dumps({**notes, file.name: _stamp(after)}).encode())


def _notes(folder: Path) -> dict[str, Any]:
    try:
        notes = json.loads((folder / NOTES).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return notes if isinstance(notes, dict) else {}
