"""What a run prints and writes: tables of rich, one JSON document, progress on stderr."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from entrants import Plan, Refused
from int8moe.benchmark.machine import this_machine
from rounds import Entrant, Point, Row

ANOTHER_LAYER = 0.05
"""Relative L2 error from which a peer does not compute the same layer; int8 activations alone give 0.02 to 0.03."""


def machine() -> dict[str, Any]:
    """What figures mean little without."""
    pages = ""
    with contextlib.suppress(OSError):
        pages = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    return {
        "cpu": this_machine().cpu,
        "cpus": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "huge_pages": pages.partition("[")[2].partition("]")[0] or None,
        "load_average": os.getloadavg()[0],
    }


def heading(plan: Plan, about: dict[str, Any]) -> str:
    """What is measured and where, before it begins."""
    sizes = ", ".join(f"{name} {size}" for name, size in plan.shape._asdict().items())
    layers = "1 layer" if plan.layers == 1 else f"{plan.layers} layers"
    return (
        f"{sizes}; {layers}, {plan.threads} threads, {plan.rounds} rounds\n"
        f"{about['cpu']}, {about['cpus']} CPUs, {about['system']}, huge pages: {about['huge_pages'] or 'unknown'}, "
        f"load {about['load_average']:.1f}\n"
    )


def show(entrants: Sequence[Entrant], refused: Sequence[Refused], points: Sequence[Point]) -> None:
    """Print the figures, then who took part, then how disturbed the run was."""
    # A pipe or a file gets lines of their own length; only a terminal folds.
    console = Console(width=None if sys.stdout.isatty() else 500, markup=False, highlight=False, emoji=False)
    _print(console, _figures(entrants, refused, points))
    console.print()
    _print(console, _taking_part(entrants))
    console.print()
    for point in points:
        console.print(_disturbance(point))


def _print(console: Console, table: Table) -> None:
    if console.is_terminal:
        console.print(table)
        return
    with console.capture() as capture:
        console.print(table)
    for line in capture.get().splitlines():  # rich fills each line up to its column's width
        console.print(line.rstrip(), soft_wrap=True)


def _table(*columns: str, left: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", overflow="fold")
    return table


def _figures(entrants: Sequence[Entrant], refused: Sequence[Refused], points: Sequence[Point]) -> Table:
    left = ("peer", "note")
    table = _table("M", "peer", "median ms", "best ms", "time / int8moe's", "min .. max", "error", "note", left=left)
    errors = {entrant.label: entrant.error for entrant in entrants}
    for point in points:
        for figures in point.rows:
            table.add_row(str(point.tokens), figures.peer, *_cells(figures, point.void, errors[figures.peer]))
    for row in refused:
        table.add_row("-", row.peer, "", "", "", "", "", row.reason)
    return table


def _cells(row: Row, void: bool, error: float | None) -> tuple[str, ...]:
    if row.median_ms is None or row.best_ms is None:
        return "", "", "", "", "", row.reason
    ratio, spread = ("void", "") if void else ("", "")
    if row.ratio is not None and not void:
        ratio, spread = f"{row.ratio.median:.2f}", f"{row.ratio.least:.2f} .. {row.ratio.most:.2f}"
    shown = "" if error is None else f"{error:.4f}"
    note = f"its error is above {ANOTHER_LAYER}: it computes something else" if _computes_something_else(error) else ""
    return f"{row.median_ms:.3f}", f"{row.best_ms:.3f}", ratio, spread, shown, note


def _computes_something_else(error: float | None) -> bool:
    return error is not None and not error <= ANOTHER_LAYER  # NaN is no result either


def _taking_part(entrants: Sequence[Entrant]) -> Table:
    columns = ("peer", "what runs", "version", "torch", "pack s", "on huge pages")
    table = _table(*columns, left=columns[:4])
    for entrant in entrants:
        loaded = entrant.loaded
        resident, huge = loaded.get("resident_bytes"), loaded.get("huge_page_bytes")
        pages = f"{huge / 2**30:.1f} of {resident / 2**30:.1f} GiB" if resident is not None and huge is not None else ""
        version = "" if loaded["version"] == f"torch {loaded['torch']}" else loaded["version"]
        packing = f"{min(loaded['pack_seconds']):.2f}"
        table.add_row(entrant.label, entrant.peer.about, version, loaded["torch"], packing, pages)
    return table


def _disturbance(point: Point) -> str:
    """How busy the machine was beside the peers, over all their blocks."""
    rows = [row for row in point.rows if row.median_ms is not None]
    wall = sum(row.disturbance["wall_seconds"] or 0.0 for row in rows)

    def mean(name: str) -> str:
        rates = [(row.disturbance[name], row.disturbance["wall_seconds"] or 0.0) for row in rows]
        known = [rate * seconds for rate, seconds in rates if rate is not None]
        return f"{sum(known) / wall:.2f}" if wall and len(known) == len(rows) else "unknown"

    return (
        f"M = {point.tokens}: int8moe against itself {point.control}{' (void)' if point.void else ''}; other processes "
        f"took {mean('foreign_cores')} cores, other guests {mean('stolen_cores')} cores; "
        f"{mean('involuntary_switches_per_second')} involuntary switches a second"
    )


def document(
    plan: Plan,
    about: dict[str, Any],
    entrants: Sequence[Entrant],
    refused: Sequence[Refused],
    points: Sequence[Point],
) -> dict[str, Any]:
    """All figures, for JSON."""
    return {
        "schema": 1,
        "shape": plan.shape._asdict(),
        "layers": plan.layers,
        "threads": plan.threads,
        "rounds": plan.rounds,
        "seconds": plan.seconds,
        "check_tokens": plan.check,
        "tolerance_percent": plan.tolerance,
        "machine": about,
        "peers": [
            {
                "peer": entrant.label,
                "about": entrant.peer.about,
                "error": entrant.error if entrant.error is not None and math.isfinite(entrant.error) else None,
                "computes_something_else": _computes_something_else(entrant.error),
                **entrant.loaded,
            }
            for entrant in entrants
        ],
        "refused": [asdict(row) for row in refused],
        "points": [asdict(point) for point in points],
    }


def say(text: str) -> None:
    """One message on stderr."""
    print(f"peers: {text}", file=sys.stderr, flush=True)


class Steps:
    """Progress on stderr: a bar on a terminal, a line for each stage elsewhere."""

    def __init__(self, total: int) -> None:
        self._bar = None
        if sys.stderr.isatty():
            columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn())
            # Drawn by us between two blocks, never by a thread beside a measurement.
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False)
            self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> Steps:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def stage(self, text: str) -> None:
        """What comes now."""
        if self._bar is None:
            say(text)
        else:
            self._bar.update(self._task, description=text)
            self._bar.refresh()

    def advance(self) -> None:
        """One step is done."""
        if self._bar is not None:
            self._bar.advance(self._task)
            self._bar.refresh()
