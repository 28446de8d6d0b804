"""A conformance case as data: no pytest, no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NoReturn

if TYPE_CHECKING:
    from .target import Target

Grid = Literal["reduced", "default", "all"]
GRIDS: tuple[Grid, ...] = ("reduced", "default", "all")


class CaseSkipped(Exception):
    """The kernel does not declare what the case needs; the text is the reason."""


def skip(reason: str) -> NoReturn:
    """Leave the running case as skipped."""
    raise CaseSkipped(reason)


@dataclass(frozen=True)
class Case:
    """One check of one kernel.

    Attributes:
        group: the group it counts in.
        name: readable and unique within the group; part of the test's id.
        run: raises AssertionError on a failure and CaseSkipped where the kernel lacks a capability.
    """

    group: str
    name: str
    run: Callable[[Target], None]

    def run_on(self, target: Target) -> None:
        """Run with one thread, where the case itself does not ask for others, and the caller's modes put back."""
        from .makers import threads

        with threads(1):
            self.run(target)

    @property
    def id(self) -> str:
        """Name of the case among all cases."""
        return f"{self.group}-{self.name}"
