"""Shared libraries that a process has loaded, as procfs lists them."""

from __future__ import annotations

import re
from pathlib import Path

_LIBRARY = re.compile(r"\.so(\.|$)")


def mapped_libraries(proc: str | Path = "/proc") -> list[str] | None:
    """Paths of the shared libraries in this process, sorted; None where the system does not list them.

    Args:
        proc: where procfs is mounted; a test may hand in a folder of its own.
    """
    try:
        text = (Path(proc) / "self" / "maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    paths = set()
    for line in text.splitlines():
        fields = line.split(maxsplit=5)  # addresses, permissions, offset, device, inode, path
        if len(fields) == 6 and fields[5].startswith("/"):
            path = fields[5].removesuffix(" (deleted)")
            if _LIBRARY.search(path.rpartition("/")[2]):
                paths.add(path)
    return sorted(paths)
