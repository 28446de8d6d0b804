"""Entry points of a group with the distributions that they are from. One damaged distribution costs no other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import metadata
from typing import Any, NamedTuple

UNKNOWN = "(unknown)"


class Found(NamedTuple):
    """One entry point, or why those of its distribution cannot be read (then ``point`` is None)."""

    distribution: str
    version: str
    point: metadata.EntryPoint | None
    error: Exception | None = None


def find_entry_points(group: str) -> Iterator[Found]:
    """Every entry point of a group; a distribution whose entry_points.txt is damaged is one row with an error."""
    try:
        points = tuple(metadata.entry_points(group=group))
    except Exception:  # one damaged file, of whatever distribution, ends importlib's call for all
        yield from _one_by_one(group)
        return
    for point in points:
        yield Found(*_name_and_version(point.dist), point)


def _one_by_one(group: str) -> Iterator[Found]:
    seen: set[str] = set()
    for distribution in metadata.distributions():
        name, version = _name_and_version(distribution)
        # As importlib does it: of two distributions with one name, the first on the path counts.
        key = re.sub(r"[-_.]+", "-", name).lower()
        if name != UNKNOWN and key in seen:
            continue
        seen.add(key)
        try:
            points = tuple(distribution.entry_points.select(group=group))
        except Exception as error:
            if _mentions(distribution, group):
                yield Found(name, version, None, error)
            continue
        for point in points:
            yield Found(name, version, point)


def _mentions(distribution: metadata.Distribution, group: str) -> bool:
    """Whether a damaged entry_points.txt is of this group; one that cannot be read at all may be."""
    try:
        return group in (distribution.read_text("entry_points.txt") or "")
    except Exception:
        return True


def _name_and_version(distribution: metadata.Distribution | None) -> tuple[str, str]:
    """Name and version, of a distribution that may have lost its METADATA."""
    try:
        found: Any = distribution.metadata if distribution is not None else {}
        # Not found["Name"]: that is None or an error, by the version of Python.
        name, version = found.get("Name"), found.get("Version")
    except Exception:
        name = version = None
    return str(name or UNKNOWN), str(version or "")
