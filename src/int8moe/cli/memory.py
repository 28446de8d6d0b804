"""Peak memory of a stretch of this process, as the operating system counts it."""

from __future__ import annotations

from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


class PeakMemory:
    """Counts from the moment it is made.

    Linux lets a process reset its own high-water mark; elsewhere only the growth of the whole process's mark
    is known, which misses a peak below an earlier one.
    """

    def __init__(self) -> None:
        try:
            _CLEAR_REFS.write_text("5", encoding="ascii")
            self._before = _status_bytes("VmRSS")
        except OSError:
            self._before = high_water_mark()

    def grown(self) -> int:
        """Bytes that the peak lies above the start."""
        return max(0, high_water_mark() - self._before)


def high_water_mark() -> int:
    """Most bytes that this process had in memory at once."""
    try:
        return _status_bytes("VmHWM")
    except OSError:
        pass
    try:
        import resource
        import sys

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    except ImportError:  # Windows
        return 0


def _status_bytes(key: str) -> int:
    for line in _STATUS.read_text(encoding="ascii", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise OSError(f"{_STATUS} has no {key}")
