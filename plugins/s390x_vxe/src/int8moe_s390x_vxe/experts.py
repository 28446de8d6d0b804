"""The tiers of this plugin: they share library, layout and hooks, and differ in one name."""

from __future__ import annotations

from int8moe.native.experts import NativeExperts

from .library import LAYOUT, LIBRARY


class S390xExperts(NativeExperts):
    """What the tiers share."""

    library = LIBRARY
    layout = LAYOUT


class ScalarExperts(S390xExperts):
    """``s390x_vxe.scalar``."""

    tier = "scalar"


class VxExperts(S390xExperts):
    """``s390x_vxe.vx``."""

    tier = "vx"


class VxeExperts(S390xExperts):
    """``s390x_vxe.vxe``."""

    tier = "vxe"
