"""How much other work went on while a worker measured, as Linux counts it. Python 3.9, standard library only."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple


class Moment(NamedTuple):
    """Counters since boot or since the start of this process; None where the system does not tell."""

    wall: float
    foreign_seconds: float | None
    """CPU time of all other processes, all cores together."""
    stolen_seconds: float | None
    """CPU time that the hypervisor gave to other guests."""
    involuntary_switches: int
    """How often this process lost a core while it had work."""


def now() -> Moment:
    """Read the counters."""
    import resource  # POSIX, as is the runner

    switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
    own = os.times()
    try:
        with Path("/proc/stat").open() as file:
            ticks = [int(word) for word in file.readline().split()[1:]]
        user, nice, system, _, _, interrupts, soft_interrupts, stolen = ticks[:8]
    except (OSError, ValueError):
        return Moment(time.perf_counter(), None, None, switches)
    hertz = os.sysconf("SC_CLK_TCK")
    busy = (user + nice + system + interrupts + soft_interrupts) / hertz
    return Moment(time.perf_counter(), busy - own.user - own.system, stolen / hertz, switches)


def between(start: Moment, end: Moment) -> dict[str, float | None]:
    """Seconds of wall time, of other processes and of other guests, and the number of involuntary switches."""

    def grown(before: float | None, after: float | None) -> float | None:
        # Counters of one tick's resolution: a short block may come out just below nothing.
        return None if before is None or after is None else max(0.0, after - before)

    return {
        "wall_seconds": end.wall - start.wall,
        "foreign_seconds": grown(start.foreign_seconds, end.foreign_seconds),
        "stolen_seconds": grown(start.stolen_seconds, end.stolen_seconds),
        "involuntary_switches": end.involuntary_switches - start.involuntary_switches,
    }
