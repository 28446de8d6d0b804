"""The groups of the conformance suite. Each module makes its cases as data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib import import_module

from ..case import Case, Grid
from ..group_names import GROUP_NAMES

GROUPS: dict[str, Callable[[Grid], Iterable[Case]]] = {
    name: import_module(f".{name}", __name__).cases for name in GROUP_NAMES
}
"""Every group by name, in the order in which they run."""


def collect_cases(grid: Grid = "default", groups: Iterable[str] | None = None) -> Iterator[Case]:
    """Make the cases of some groups (None = all), in order."""
    wanted = GROUPS if groups is None else list(groups)
    for name in wanted:
        yield from GROUPS[name](grid)
