"""Memory that is free, and what the control groups around this process leave of it. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from .control_groups import controller_folders, file_words, unified_folders

_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ")


def available_memory(proc: str | Path = "/proc", sys: str | Path = "/sys") -> int | None:
    """Bytes that this process can still have: the system's, or less where a control group grants less.

    None where the system does not say.
    """
    free = [max(0, limit - used) for _, limit, used in memory_limits(Path(proc), Path(sys))]
    of_the_system = meminfo(Path(proc), "MemAvailable")
    return min(free if of_the_system is None else [*free, of_the_system], default=None)


def memory_limits(proc: Path, sys: Path) -> Iterator[tuple[Path, int, int]]:
    """Each file with a limit, its bytes, and the bytes in use without cached files, which the system would drop."""
    versions = (
        (unified_folders(proc, sys), "memory.max", "memory.current", "inactive_file"),
        (controller_folders(proc, sys, "memory"), "memory.limit_in_bytes", "memory.usage_in_bytes",
         "total_inactive_file"),
    )  # fmt: skip
    for folders, limit_name, usage_name, cache_key in versions:
        for folder in folders:
            limit, usage = _number(folder / limit_name), _number(folder / usage_name)
            if limit is not None and usage is not None:
                words = file_words(folder / "memory.stat")
                cache = dict(zip(words[::2], words[1::2], strict=False)).get(cache_key, "0")
                yield folder / limit_name, limit, max(0, usage - (int(cache) if cache.isdecimal() else 0))


def huge_bytes(address: int, length: int, proc: str | Path = "/proc") -> int | None:
    """Bytes of a buffer of this process that lie on huge pages; None where the system does not say.

    Args:
        address: of its first byte.
        length: in bytes.
        proc: where procfs is mounted.
    """
    total, inside, seen = 0, False, False
    try:
        lines = (Path(proc) / "self" / "smaps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        if mapping := _MAPPING.match(line):
            start, end = (int(word, 16) for word in mapping.groups())
            inside = start < address + length and address < end
        elif inside and line.startswith("AnonHugePages:"):
            seen = True
            total += int(line.split()[1]) * 1024
    return min(total, length) if seen else None


def meminfo(proc: Path, key: str) -> int | None:
    """Bytes of a line of /proc/meminfo, which counts in KiB."""
    words = file_words(proc / "meminfo")
    if f"{key}:" in words[:-1]:
        value = words[words.index(f"{key}:") + 1]
        return int(value) * 1024 if value.isdecimal() else None
    return None


def _number(path: Path) -> int | None:
    words = file_words(path)
    return int(words[0]) if words and words[0].isdecimal() else None
