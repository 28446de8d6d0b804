"""The tiers of this plugin: they share library, layout and hooks, and differ in one name."""

from __future__ import annotations

from int8moe.native.experts import NativeExperts

from .library import LAYOUT, LIBRARY


class Aarch64Experts(NativeExperts):
    """What the tiers share."""

    library = LIBRARY
    layout = LAYOUT


class NeonExperts(Aarch64Experts):
    """``aarch64_neon.neon``."""

    tier = "neon"


class DotprodExperts(Aarch64Experts):
    """``aarch64_neon.dotprod``."""

    tier = "dotprod"


class I8mmExperts(Aarch64Experts):
    """``aarch64_neon.i8mm``."""

    tier = "i8mm"
