"""How much of the machine others had while something was measured. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

OTHERS_LIMIT = 0.05
STEAL_LIMIT = 0.02
"""Shares of all CPUs above which a run counts as disturbed."""


class Snapshot(NamedTuple):
    """Counters at one moment.

    Attributes:
        wall: seconds of a monotonic clock.
        own: CPU seconds of this process, all of its threads.
        busy: CPU seconds of everybody on this machine, without steal; None where the system does not say.
        steal: CPU seconds that the hypervisor gave to other machines.
        cpus: CPUs that ``busy`` and ``steal`` are counted over.
        switches: times that a thread of this process was put off a CPU against its will.
        load: processes that ran or wanted to, mean of a minute; None where the system does not say.
    """

    wall: float
    own: float
    busy: float | None
    steal: float | None
    cpus: int
    switches: int
    load: float | None


@dataclass(frozen=True)
class Disturbance:
    """What happened between two snapshots.

    Attributes:
        seconds: between them.
        cpus: of the machine.
        own: share of all CPUs that this process used, 0 to 1.
        others: share that other processes used; None where the system does not say.
        steal: share that the hypervisor took.
        involuntary_switches: of this process.
        load_before: load average of a minute.
        load_after: the same, at the end.
    """

    seconds: float
    cpus: int
    own: float
    others: float | None
    steal: float | None
    involuntary_switches: int
    load_before: float | None
    load_after: float | None

    @property
    def disturbed(self) -> bool | None:
        """Whether others had more than the limits above; None where the system does not say."""
        if self.others is None or self.steal is None:
            return None
        return self.others > OTHERS_LIMIT or self.steal > STEAL_LIMIT


def snapshot(proc: str | Path = "/proc") -> Snapshot:
    """Read the counters now.

    Args:
        proc: where procfs is mounted; a test may hand in a folder of its own.
    """
    busy = steal = None
    cpus = os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = (Path(proc) / "stat").read_text(encoding="ascii").splitlines()
        # user nice system idle iowait irq softirq steal; guest time is part of user
        ticks = [int(word) for word in lines[0].split()[1:9]]
        per_second = os.sysconf("SC_CLK_TCK")
        busy = (sum(ticks[:3]) + ticks[5] + ticks[6]) / per_second
        steal = ticks[7] / per_second
        cpus = sum(line.startswith("cpu") for line in lines) - 1 or cpus
    load = None
    with contextlib.suppress(OSError, AttributeError):
        load = os.getloadavg()[0]
    return Snapshot(time.monotonic(), time.process_time(), busy, steal, cpus, _involuntary_switches(), load)


def _involuntary_switches() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def between(before: Snapshot, after: Snapshot) -> Disturbance:
    """What happened from one snapshot to the other."""
    seconds = max(after.wall - before.wall, 1e-9)
    available = seconds * after.cpus
    own = after.own - before.own
    others = steal = None
    if before.busy is not None and after.busy is not None:
        others = max(0.0, after.busy - before.busy - own) / available
    if before.steal is not None and after.steal is not None:
        steal = max(0.0, after.steal - before.steal) / available
    return Disturbance(
        seconds=seconds,
        cpus=after.cpus,
        own=own / available,
        others=others,
        steal=steal,
        involuntary_switches=after.switches - before.switches,
        load_before=before.load,
        load_after=after.load,
    )
