"""What an installed distribution requires, against what is installed."""

from __future__ import annotations

from importlib import metadata
from typing import NamedTuple

from packaging.requirements import InvalidRequirement, Requirement


class Required(NamedTuple):
    """One requirement: its text, the distribution's name, its installed version (None = absent), whether it is met."""

    text: str
    name: str
    version: str | None
    met: bool


def requirements_of(distribution: metadata.Distribution) -> list[Required]:
    """The requirements that hold on this machine, without those of extras."""
    found = []
    for text in distribution.requires or ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            found.append(Required(text, text, None, met=False))
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = installed_version(requirement.name)
        met = version is not None and requirement.specifier.contains(version, prereleases=True)
        # Without its marker, as it is written for an installer.
        found.append(Required(f"{requirement.name}{requirement.specifier}", requirement.name, version, met))
    return found


def installed_version(name: str) -> str | None:
    """Version of a distribution; None when it is not installed, or has lost its metadata."""
    try:
        return str(metadata.version(name))
    except (metadata.PackageNotFoundError, KeyError):
        return None
