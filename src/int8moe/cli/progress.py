"""Progress of weights and of measuring on stderr: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

from .output import say

if TYPE_CHECKING:
    from rich.progress import Progress
    from typing_extensions import Self

_SECONDS_BETWEEN_LINES = 5.0
_SECONDS_BETWEEN_DRAWINGS = 0.1


class _Drawn:
    """A bar on a terminal, for the time of a block; none elsewhere.

    Args:
        total: what a full bar stands for.
        binary: whether that is bytes, to be shown beside it.
    """

    def __init__(self, total: int, *, binary: bool) -> None:
        self._bar = _make_bar(binary=binary) if sys.stderr.isatty() else None
        self._task = self._bar.add_task("", total=total, left="") if self._bar is not None else None

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _draw_bar(self, completed: float, description: str, left: str) -> bool:
        """Redraw it; False where there is none."""
        if self._bar is None or self._task is None:
            return False
        self._bar.update(self._task, completed=completed, description=description, left=left)
        self._bar.refresh()
        return True


class WeightProgress(_Drawn):
    """Bytes of weights that are packed, or done what else with, of all that will be, and the time that is left.

    Nothing is redrawn in the background: the kernels that are timed between two layers have the cores alone.
    """

    def __init__(self, total: int, *, doing: str = "packing", done: str = "packed") -> None:
        self._total = max(total, 1)
        self._doing, self._finished = doing, done
        self._done = 0
        self._seconds = 0.0
        self._name = ""
        self._started = self._shown = time.monotonic()
        super().__init__(self._total, binary=True)

    def set_total(self, total: int) -> None:
        """Correct the sum of all bytes."""
        self._total = max(total, 1)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, total=self._total)

    def begin(self, name: str) -> None:
        """Start on a layer or file."""
        self._name = name
        self._started = time.monotonic()

    def advance(self, nbytes: int) -> None:
        """Note that so many more bytes of it are read."""
        self._done += nbytes
        self._show(self._doing, at_once=False)

    def end(self, *, cached: bool = False) -> None:
        """Finish it; ``cached`` says that it came from the packed cache, and that nothing was done."""
        self._show("from the cache:" if cached else self._finished, at_once=True)
        self._seconds += time.monotonic() - self._started

    def _show(self, verb: str, *, at_once: bool) -> None:
        now = time.monotonic()
        pause = _SECONDS_BETWEEN_LINES if self._bar is None else _SECONDS_BETWEEN_DRAWINGS
        if not at_once and now - self._shown < pause:
            return
        self._shown = now
        text, left = f"{verb} {self._name}", self._left(now)
        if not self._draw_bar(self._done, text, left):
            say(f"{text}: {human_bytes(self._done)} of {human_bytes(self._total)}, {left}")

    def _left(self, now: float) -> str:
        """Time left, from the time that packing itself took: what runs between two layers does not count."""
        seconds = self._seconds + now - self._started
        if not self._done:
            return "?"
        return f"{seconds / self._done * (self._total - self._done):.0f} s left"


class MeasuringProgress(_Drawn):
    """Points of a benchmark that are measured, of all that will be. Drawn between two rounds, as packing is."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._name = ""
        self._shown = 0.0
        super().__init__(total, binary=False)

    def begin(self, name: str) -> None:
        """Start on a point."""
        self._name = name
        self._draw(0.0)

    def tick(self, done: float) -> None:
        """Note which share of the point is done, 0 to 1; drawn on a terminal only."""
        if time.monotonic() - self._shown >= _SECONDS_BETWEEN_DRAWINGS:
            self._draw(done)

    def end(self, text: str) -> None:
        """Finish the point, with what came out."""
        self._done += 1
        self._draw(0.0)
        if self._bar is None:
            say(f"measured {self._name} ({self._done} of {self._total}): {text}")

    def _draw(self, done: float) -> None:
        self._shown = time.monotonic()
        self._draw_bar(self._done + done, f"measuring {self._name}", f"{self._done} of {self._total} points")


def _make_bar(*, binary: bool) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        *([DownloadColumn(binary_units=True)] if binary else []),
        TextColumn("{task.fields[left]}", markup=False),
        console=Console(stderr=True),
        transient=True,
        auto_refresh=False,
    )


def human_bytes(count: int) -> str:
    """``1536`` -> ``"1.5 KiB"``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError
