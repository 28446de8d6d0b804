"""What this processor and system can run, as data: CpuFacts, and why a tier is refused. Imports no torch."""

from __future__ import annotations

import ctypes
import struct
from typing import NamedTuple

from .library import LIBRARY

# int8moe_s390x_facts: see csrc/dispatcher.h.
FACTS = struct.Struct("@II Q")

TIERS = ("scalar", "vx", "vxe")
"""Every tier that this module can judge, weakest first."""

_VX, _VXE = 11, 13  # bits of AT_HWCAP: HWCAP_S390_VXRS, HWCAP_S390_VXRS_EXT


class CpuFacts(NamedTuple):
    """What Linux says in AT_HWCAP; the defaults are a processor that can do nothing.

    Attributes:
        vx: vector facility (z13), usable: the system saves its registers.
        vxe: vector-enhancements facility 1 (z14); worth nothing without vx, and some emulators set it alone.
    """

    vx: bool = False
    vxe: bool = False


def decode(raw: bytes) -> CpuFacts:
    """CpuFacts of an int8moe_s390x_facts."""
    _, _, hwcap = FACTS.unpack(raw)
    return CpuFacts(vx=bool(hwcap >> _VX & 1), vxe=bool(hwcap >> _VXE & 1))


def read_cpu() -> CpuFacts:
    """Ask the system; replaced by tests. Raises LibraryUnavailable where the library does not load."""
    library = LIBRARY.load()
    raw = ctypes.create_string_buffer(FACTS.pack(FACTS.size, 0, 0), FACTS.size)
    library.int8moe_s390x_probe(raw)
    return decode(raw.raw)


def refusal(tier: str, facts: CpuFacts) -> str | None:
    """Why ``tier`` cannot run on a machine with these facts; None when it can."""
    if tier not in TIERS:
        raise ValueError(f"unknown tier {tier!r}; known: {', '.join(TIERS)}")
    if tier != "scalar" and not facts.vx:
        return "the vector facility (vx) is not there, or not enabled by the system"
    if tier == "vxe" and not facts.vxe:
        return "the CPU has no vector-enhancements facility 1 (vxe)"
    return None
