"""Entry point of group ``int8moe.kernels``: declares the tiers. Imports no torch."""

from __future__ import annotations

from int8moe.contracts import KernelSpec
from int8moe.hookspecs import hookimpl
from int8moe.native import Tier, declare_tiers

from . import probe
from .library import LAYOUT, LIBRARY

# In the words of /proc/cpuinfo.
_TIERS = {
    "scalar": Tier((), 30, "ScalarExperts"),
    "vx": Tier((("vx",),), 40, "VxExperts"),
    "vxe": Tier((("vx", "vxe"),), 50, "VxeExperts"),
}

isa_ladder = tuple(_TIERS)


@hookimpl
def register_kernels() -> list[KernelSpec]:
    """Declare every tier as a kernel ``s390x_vxe.<tier>``; one that cannot run here as unavailable, with the reason."""
    return declare_tiers(LIBRARY, LAYOUT, _TIERS, read_cpu=probe.read_cpu, refusal=probe.refusal)
