"""What became of a probe: its reports, how its process ended, and what it left on stderr."""

from __future__ import annotations

import contextlib
import json
from typing import Any, NamedTuple

from ..cli.signals import signal_text

MARK = "int8moe-probe:"
"""Begins each line of a report: what the interpreter or a site hook prints on stdout is told apart by it."""

GRACE_SECONDS = 2.0
"""A process may take this beyond its limit: for its start, and for the stacks that it shows when the limit is over."""

_SHOWN_LINES = 20
_SHOWN_BEFORE_A_STACK = 5
_STACKS = ("Fatal Python error:", "Timeout (")  # as faulthandler begins them


class Outcome(NamedTuple):
    """What a probe reported, and how it ended.

    Attributes:
        reports: (kind, document) in order; those before a crash are there.
        ended: "" when it ended by itself with status 0; else what happened, as the rest of a sentence that begins
            with "the process".
        stderr: the lines of its stderr that tell most.
    """

    reports: tuple[tuple[str, Any], ...] = ()
    ended: str = ""
    stderr: str = ""

    @classmethod
    def read(cls, stdout: str, stderr: str, status: int | None, limit: float) -> Outcome:
        """The outcome of a process.

        Args:
            stdout: all of it.
            stderr: all of it.
            status: exit status, negative = a signal; None = it was still running after ``limit`` seconds.
            limit: seconds.
        """
        if status is None:
            ended = f"was still running after {limit:g} s and was ended (--time-limit gives more)"
        elif status < 0:
            ended = f"was ended by {signal_text(-status)}"
        else:
            ended = f"left with exit status {status}" if status else ""
        return cls(_parse(stdout), ended, _telling_lines(stderr))

    @classmethod
    def of(cls, document: Any) -> Outcome:
        """The outcome that was written as a document (a list of the fields); an empty one for None."""
        if document is None:
            return cls()
        reports, ended, stderr = document
        return cls(tuple((str(kind), report) for kind, report in reports), ended, stderr)

    def last(self, kind: str) -> Any:
        """The last document of that kind, or None."""
        return next((document for found, document in reversed(self.reports) if found == kind), None)

    def every(self, kind: str) -> list[Any]:
        """All documents of that kind."""
        return [document for found, document in self.reports if found == kind]

    @property
    def how_it_ended(self) -> str:
        """``ended``, also for a process that left in peace before its work was done."""
        return self.ended or "left with exit status 0"


def report_line(kind: str, document: Any) -> str:
    """One report; it begins on a line of its own, whatever else has been printed."""
    return f"\n{MARK}{json.dumps([kind, document])}\n"


def without_import_frames(trace: str) -> str:
    """A traceback or stack without the frames of the interpreter's own import system."""
    return "\n".join(line for line in trace.splitlines() if '"<frozen importlib' not in line)


def _parse(stdout: str) -> tuple[tuple[str, Any], ...]:
    reports = []
    for line in stdout.splitlines():
        if line.startswith(MARK):
            with contextlib.suppress(ValueError):  # cut off by the end of the process
                kind, document = json.loads(line.removeprefix(MARK))
                reports.append((str(kind), document))
    return tuple(reports)


def _telling_lines(stderr: str) -> str:
    lines = without_import_frames(stderr).splitlines()
    stacks = [number for number, line in enumerate(lines) if line.startswith(_STACKS)]
    # A stack begins with the innermost frame, any other text ends with what matters.
    first = max(0, stacks[-1] - _SHOWN_BEFORE_A_STACK) if stacks else max(0, len(lines) - _SHOWN_LINES)
    return "\n".join(lines[first : first + _SHOWN_LINES])
