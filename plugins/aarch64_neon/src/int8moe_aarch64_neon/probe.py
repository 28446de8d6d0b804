"""What this processor can run, as data: CpuFacts, and why a tier is refused. Imports no torch."""

from __future__ import annotations

import ctypes
import struct
from typing import NamedTuple

from .library import LIBRARY

# int8moe_aarch64_facts: struct_bytes, reserved, hwcap, hwcap2.
FACTS = struct.Struct("@II QQ")

TIERS = ("neon", "dotprod", "i8mm")
"""Every tier that this module can judge, weakest first."""


class CpuFacts(NamedTuple):
    """HWCAP and HWCAP2, decoded; the defaults are a processor that can do nothing.

    Attributes:
        atomics: the large-system atomics of Armv8.1; every processor with one of the two below has them, and compilers
            use them in units that are built for it.
    """

    asimd: bool = False
    atomics: bool = False
    dotprod: bool = False
    i8mm: bool = False


def decode(raw: bytes) -> CpuFacts:
    """CpuFacts of an int8moe_aarch64_facts."""
    _, _, hwcap, hwcap2 = FACTS.unpack(raw)

    def bit(word: int, position: int) -> bool:
        return bool(word >> position & 1)

    return CpuFacts(asimd=bit(hwcap, 1), atomics=bit(hwcap, 8), dotprod=bit(hwcap, 20), i8mm=bit(hwcap2, 13))


def read_cpu() -> CpuFacts:
    """Ask the system; replaced by tests. Raises LibraryUnavailable where the library does not load."""
    library = LIBRARY.load()
    raw = ctypes.create_string_buffer(FACTS.pack(FACTS.size, 0, 0, 0), FACTS.size)
    library.int8moe_aarch64_probe(raw)
    return decode(raw.raw)


def refusal(tier: str, facts: CpuFacts) -> str | None:
    """Why ``tier`` cannot run on a machine with these facts; None when it can."""
    no_atomics = (facts.atomics, "the CPU has no large-system atomics (FEAT_LSE)")
    if tier == "neon":
        return _first((facts.asimd, "the CPU has no Advanced SIMD"))
    if tier == "dotprod":
        return _first((facts.dotprod, "the CPU has no int8 dot products (FEAT_DotProd)"), no_atomics)
    if tier == "i8mm":
        return _first((facts.i8mm, "the CPU has no int8 matrix multiplication (FEAT_I8MM)"), no_atomics)
    raise ValueError(f"unknown tier {tier!r}; known: {', '.join(TIERS)}")


def _first(*conditions: tuple[bool, str]) -> str | None:
    return next((reason for holds, reason in conditions if not holds), None)
