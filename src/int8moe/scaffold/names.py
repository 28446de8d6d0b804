"""What a new plugin may be called, and the names that follow from its namespace."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib import util
from typing import NamedTuple

from ..distributions import find_entry_points
from ..errors import ConfigError
from ..hookspecs import ENTRY_POINT_GROUP
from ..host import feature_words
from ..near_names import near_names
from ..registry import hint_table

ANY_ISA = "any"
"""For --isa: the kernel needs no feature of the CPU."""

_RESERVED = {
    "int8moe": "it owns the canonical layout",
    "reference": "it is the core's own kernel",
}
_NAMESPACE = re.compile(r"[a-z](?:[a-z0-9_]*[a-z0-9])?")
_LONGEST = 40  # names of files and lines of code are made of it


class PluginNames(NamedTuple):
    """The names of one plugin."""

    namespace: str
    isa: str
    native: bool

    @property
    def dashed(self) -> str:
        """The namespace as distributions and folders write it."""
        return re.sub("_+", "-", self.namespace)

    @property
    def distribution(self) -> str:
        """Name of the distribution."""
        return f"int8moe-{self.dashed}"

    @property
    def package(self) -> str:
        """Name of the Python package."""
        return f"int8moe_{self.namespace}"

    @property
    def class_stem(self) -> str:
        """The namespace as a Python or C++ class begins."""
        return "".join(word.capitalize() for word in self.namespace.split("_"))

    @property
    def short_name(self) -> str:
        """The kernel's name after the dot: the ISA, or what it is written in."""
        if self.isa == ANY_ISA:
            return "scalar" if self.native else "torch"
        return re.sub(r"\W", "_", self.isa, flags=re.ASCII)

    @property
    def kernel(self) -> str:
        """Full name of the kernel."""
        return f"{self.namespace}.{self.short_name}"

    @property
    def layout(self) -> str:
        """Name of the layout that it packs to."""
        return "i8_n16k4" if self.native else "i8_transposed"


def check_namespace(namespace: str) -> str:
    """Return the namespace.

    Raises:
        ConfigError: it is no name for a plugin, or taken.
    """
    if not _NAMESPACE.fullmatch(namespace) or len(namespace) > _LONGEST:
        raise ConfigError(
            f"{namespace!r} is no namespace: write at most {_LONGEST} lower-case letters, digits and underscores, "
            "beginning with a letter and not ending with an underscore, such as acme or my_cpu"
        )
    names = PluginNames(namespace, ANY_ISA, native=False)
    known = {row["distribution"] for row in hint_table()}
    owner = _RESERVED.get(namespace) or (f"{names.distribution} exists" if names.distribution in known else "")
    if owner:
        raise ConfigError(f"the namespace {namespace!r} is reserved ({owner}): choose another")
    for found in find_entry_points(ENTRY_POINT_GROUP):
        if found.point is not None and found.point.name == namespace:
            raise ConfigError(
                f"the namespace {namespace!r} is taken by the installed plugin {found.distribution} {found.version}: "
                "choose another, or uninstall that"
            )
    if util.find_spec(names.package) is not None:
        raise ConfigError(f"a package {names.package} is installed already: choose another namespace, or uninstall it")
    return namespace


def check_isa(word: str, *, foreign: bool = False, known: Iterable[str] | None = None) -> str:
    """Return the word.

    Args:
        word: "any", or a feature of the CPU as /proc/cpuinfo spells it.
        foreign: take a word that this machine does not have.
        known: this machine's words; None = look.

    Raises:
        ConfigError: no such feature here.
    """
    if word == ANY_ISA:
        return word
    if not re.fullmatch(r"\w[\w.]*", word, flags=re.ASCII) or len(word) > _LONGEST:
        raise ConfigError(f"{word!r} is no feature of a CPU: give one word of /proc/cpuinfo, or {ANY_ISA}")
    words = feature_words() if known is None else frozenset(known)
    if word in words or foreign:
        return word
    near = near_names(word.lower(), sorted(words), count=4)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise ConfigError(
        f"this machine's CPU has no feature {word!r}: {hint}Give a word of /proc/cpuinfo, or {ANY_ISA}; "
        "--foreign takes a word of another machine"
    )
