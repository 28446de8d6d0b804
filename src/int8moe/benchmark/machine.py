"""What figures depend on besides the kernel: CPU, caches, memory, pages. Imports no torch."""

from __future__ import annotations

import contextlib
import platform
from pathlib import Path
from typing import NamedTuple

_MODEL_KEYS = ("model name", "cpu model", "uarch", "cpu")
"""Of /proc/cpuinfo, by architecture."""


class Machine(NamedTuple):
    """Facts of this machine.

    Attributes:
        cpu: model as the system calls it.
        machine: as ``uname -m`` prints it.
        system: "Linux", "Darwin", "Windows".
        cache_bytes: largest cache of the first CPU; None where the system does not say.
    """

    cpu: str
    machine: str
    system: str
    cache_bytes: int | None


def this_machine(proc: str | Path = "/proc", sys: str | Path = "/sys") -> Machine:
    """Describe this machine; a test may hand in folders of its own."""
    return Machine(_cpu_model(Path(proc)), platform.machine(), platform.system(), _largest_cache(Path(sys)))


def _cpu_model(proc: Path) -> str:
    found: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in (proc / "cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            found.setdefault(key.strip().lower(), value.strip())
    named = (found[key] for key in _MODEL_KEYS if found.get(key))
    return next(named, "") or platform.processor() or platform.machine()


def _largest_cache(sys: Path) -> int | None:
    sizes = []
    for file in (sys / "devices" / "system" / "cpu" / "cpu0" / "cache").glob("index*/size"):
        with contextlib.suppress(OSError, ValueError):
            text = file.read_text(encoding="ascii").strip()
            scale = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
            sizes.append(int(text.rstrip("KMG")) * scale)
    return max(sizes, default=None)
