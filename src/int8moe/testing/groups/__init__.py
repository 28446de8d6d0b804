"""The groups of the conformance suite. Each module makes its cases as data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from ..case import Case, Grid
from . import batch, bits, declaration, fork, integers, operator, packing, refusals, routing, rows, special, strides

GROUPS: dict[str, Callable[[Grid], Iterable[Case]]] = {
    "declaration": declaration.cases,
    "packing": packing.cases,
    "integers": integers.cases,
    "bits": bits.cases,
    "routing": routing.cases,
    "batch": batch.cases,
    "strides": strides.cases,
    "special": special.cases,
    "rows": rows.cases,
    "operator": operator.cases,
    "fork": fork.cases,
    "refusals": refusals.cases,
}
"""Every group by name, in the order in which they run."""


def collect_cases(grid: Grid = "default", groups: Iterable[str] | None = None) -> Iterator[Case]:
    """Make the cases of some groups (None = all), in order."""
    wanted = GROUPS if groups is None else list(groups)
    for name in wanted:
        yield from GROUPS[name](grid)
