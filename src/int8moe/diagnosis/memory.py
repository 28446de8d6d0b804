"""Memory that is free, and what control groups leave of it."""

from __future__ import annotations

from pathlib import Path

from ..host_memory import meminfo, memory_limits
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
    total, available = (meminfo(proc, key) for key in ("MemTotal", "MemAvailable"))
    findings = []
    if total is None or available is None:
        findings.append(note(CHECK, f"the system does not say how much memory is free: no {proc / 'meminfo'}"))
    else:
        text = f"{_gib(available)} of {_gib(total)} are free"
        findings.append(_judged(text, available, "end other processes, or use a machine with more memory"))
    for limit_file, limit, used in memory_limits(proc, sys):
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


def _gib(count: int) -> str:
    return f"{count / _GIB:.1f} GiB"
