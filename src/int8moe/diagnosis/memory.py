"""Memory that is free, and what control groups leave of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ..control_groups import controller_folders, file_words, unified_folders
from .finding import Finding, note, ok, problem

CHECK = "memory"
_GIB = 1 << 30
_TIGHT, _SMALL = _GIB // 4, 2 * _GIB
"""Below the first torch and one small layer hardly fit; below the second few real layers do."""


def check(proc: Path, sys: Path) -> list[Finding]:
    """Free memory of the machine, and under each limit of a control group around this process.

    Args:
        proc: where procfs is mounted.
        sys: where sysfs is mounted.
    """
    total, available = (_meminfo(proc, key) for key in ("MemTotal", "MemAvailable"))
    findings = []
    if total is None or available is None:
        findings.append(note(CHECK, f"the system does not say how much memory is free: no {proc / 'meminfo'}"))
    else:
        text = f"{_gib(available)} of {_gib(total)} are free"
        findings.append(_judged(text, available, "end other processes, or use a machine with more memory"))
    for limit_file, limit, used in _limits(proc, sys):
        if limit >= (total or 1 << 60):  # no limit is written as a number that no machine has
            continue
        free = max(0, limit - used)
        text = f"{limit_file.relative_to(sys)} limits this process to {_gib(limit)}, of which {_gib(free)} are free"
        findings.append(_judged(text, free, f"raise the memory limit of the container or of {limit_file.parent}"))
    return findings


def _judged(text: str, free: int, mend: str) -> Finding:
    if free < _TIGHT:
        return problem(CHECK, text, mend)
    return note(CHECK, text, mend) if free < _SMALL else ok(CHECK, text)


def _limits(proc: Path, sys: Path) -> Iterator[tuple[Path, int, int]]:
    """Each file with a limit, its bytes, and the bytes in use without what the system would drop."""
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
                yield folder / limit_name, limit, usage - (int(cache) if cache.isdecimal() else 0)


def _number(path: Path) -> int | None:
    words = file_words(path)
    return int(words[0]) if words and words[0].isdecimal() else None


def _meminfo(proc: Path, key: str) -> int | None:
    """Bytes of a line of /proc/meminfo, which counts in KiB."""
    words = file_words(proc / "meminfo")
    if f"{key}:" in words[:-1]:
        value = words[words.index(f"{key}:") + 1]
        return int(value) * 1024 if value.isdecimal() else None
    return None


def _gib(count: int) -> str:
    return f"{count / _GIB:.1f} GiB"
