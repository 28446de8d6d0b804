"""Names that are like one that does not exist, for errors. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable


def near_names(name: str, known: Iterable[str], *, count: int, cutoff: float = 0.6) -> list[str]:
    """At most ``count`` of the known names, the nearest first; ``cutoff`` is the least likeness, 0 to 1."""
    import difflib  # only where a name is wrong: starting up is measured

    return difflib.get_close_matches(name, list(known), n=count, cutoff=cutoff)
