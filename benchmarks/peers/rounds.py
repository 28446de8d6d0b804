"""Turns of the peers, one block of calls each, round after round, and the ratios that come of them.

A ratio is taken within a round: what disturbed the machine meanwhile disturbed all alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from peer import Peer
from worker_process import PeerFailed, WorkerProcess

BASE = "int8moe"
"""The peer that the others are compared with."""
CONTROL = "int8moe (again)"
"""The same in a second worker: what it differs by is noise."""


@dataclass
class Entrant:
    """A peer that takes part, and what it said once its layers were packed."""

    label: str
    peer: Peer
    process: WorkerProcess
    loaded: dict[str, Any]
    error: float | None = None
    """Relative L2 error against the float32 reference; None where it was not asked for."""


@dataclass
class Ratio:
    """Time of a peer in times of :data:`BASE`, over the rounds; above 1 the peer is slower."""

    median: float
    least: float
    most: float


@dataclass
class Row:
    """Figures of one peer for one number of tokens; all None but ``reason`` where it has none."""

    peer: str
    reason: str = ""
    median_ms: float | None = None
    best_ms: float | None = None
    ratio: Ratio | None = None
    blocks_ms: list[float] = field(default_factory=list)
    """Median of each block."""
    calls: int = 0
    disturbance: dict[str, float | None] = field(default_factory=dict)
    """``wall_seconds``, and meanwhile: ``foreign_cores``, ``stolen_cores``, ``involuntary_switches_per_second``."""


@dataclass
class Point:
    """All peers at one number of tokens."""

    tokens: int
    rows: list[Row]
    control_percent: float | None
    """By how much BASE differs from itself; None where one of the two has no figures."""
    void: bool
    """Whether that is more than was allowed, so that no ratio means anything."""

    @property
    def control(self) -> str:
        """The same in words."""
        return "has no figures" if self.control_percent is None else f"differs by {self.control_percent:.1f} %"


class Turns:
    """What one peer did in its turns at one number of tokens."""

    def __init__(self, entrant: Entrant) -> None:
        self.entrant = entrant
        self.reason = ""
        self.blocks: list[list[float]] = []
        self.disturbances: list[dict[str, float | None]] = []

    def ask(self, order: str, **arguments: Any) -> dict[str, Any]:
        """One order to the worker; a failure becomes the reason, and an empty answer."""
        try:
            return self.entrant.process.ask(order, **arguments)
        except PeerFailed as failure:
            self.reason = str(failure)
            return {}

    def block(self, seconds: float) -> None:
        """One turn, unless the peer has failed before."""
        answer = {} if self.reason else self.ask("block", seconds=seconds)
        if answer:
            self.blocks.append(answer["seconds"])
            self.disturbances.append(answer["disturbance"])

    def medians(self) -> list[float]:
        """Milliseconds of each block; none where the peer failed in one of them."""
        return [] if self.reason else [statistics.median(block) * 1e3 for block in self.blocks]

    def row(self, base: Sequence[float]) -> Row:
        """Figures, with ratios to the blocks of BASE in the same rounds."""
        medians = self.medians()
        if not medians:
            return Row(self.entrant.label, reason=self.reason)
        times = [seconds * 1e3 for block in self.blocks for seconds in block]
        ratios = [own / other for own, other in zip(medians, base, strict=True)] if base else []
        return Row(
            peer=self.entrant.label,
            median_ms=statistics.median(times),
            best_ms=min(times),
            ratio=Ratio(statistics.median(ratios), min(ratios), max(ratios)) if ratios else None,
            blocks_ms=medians,
            calls=len(times),
            disturbance=_rates(self.disturbances),
        )


def measure(
    entrants: Sequence[Entrant], tokens: int, rounds: int, seconds: float, tolerance: float, advance: Callable[[], None]
) -> Point:
    """Time every peer at one number of tokens.

    Args:
        entrants: BASE first, CONTROL among the others.
        tokens: rows of each call.
        rounds: blocks of each peer.
        seconds: least length of a block.
        tolerance: percent by which CONTROL may differ from BASE.
        advance: called after each block.
    """
    turns = [Turns(entrant) for entrant in entrants]
    checksums = [turn.ask("prepare", tokens=tokens).get("checksum") for turn in turns]
    for turn, checksum in zip(turns, checksums, strict=True):
        if not turn.reason and checksum != checksums[0]:
            turn.reason = OTHER_WORK
    for _ in range(rounds):
        for turn in turns:
            turn.block(seconds)
            advance()
    base = turns[0].medians()
    rows = [turn.row(base) for turn in turns]
    control = next(row.ratio for row in rows if row.peer == CONTROL)
    percent = None if control is None else (max(control.median, 1 / control.median) - 1) * 100
    return Point(tokens, rows, percent, void=percent is None or percent > tolerance)


OTHER_WORK = "its weights or inputs are not those of int8moe's worker: its torch draws other numbers"


def _rates(disturbances: Sequence[dict[str, float | None]]) -> dict[str, float | None]:
    """Sums over blocks, by second of their wall time."""

    def total(name: str) -> float | None:
        values = [disturbance[name] for disturbance in disturbances]
        return sum(value for value in values if value is not None) if None not in values else None

    wall = total("wall_seconds") or 0.0
    names = {
        "foreign_seconds": "foreign_cores",
        "stolen_seconds": "stolen_cores",
        "involuntary_switches": "involuntary_switches_per_second",
    }
    rates: dict[str, float | None] = {"wall_seconds": wall}
    for name, rate in names.items():
        value = total(name)
        rates[rate] = value / wall if value is not None and wall else None
    return rates
