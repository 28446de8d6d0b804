"""What this processor and system can run, as data: CpuFacts, and why a tier is refused. Imports no torch."""

from __future__ import annotations

import errno
import os
import struct
from typing import NamedTuple

from .library import LIBRARY

# int8moe_x86_facts, after its first field.
FACTS = struct.Struct("@I IIIIIII Q iI")

TIERS = ("avx2", "avx_vnni", "avx512_vnni", "amx_int8")
"""Every tier that this module can judge, weakest first."""


class CpuFacts(NamedTuple):
    """CPUID, XCR0 and the AMX permission, decoded; the defaults are a processor that can do nothing.

    Attributes:
        amx_permission: 0 = granted, an errno = refused, None = not asked (no AMX, or nobody needs it).
    """

    avx2: bool = False
    avx_vnni: bool = False
    avx512f: bool = False
    avx512bw: bool = False
    avx512vl: bool = False
    avx512_vnni: bool = False
    amx_tile: bool = False
    amx_int8: bool = False
    os_avx: bool = False
    os_avx512: bool = False
    os_amx: bool = False
    amx_permission: int | None = None


def decode(raw: bytes) -> CpuFacts:
    """CpuFacts of an int8moe_x86_facts."""
    _, _, _, ebx, ecx, edx, eax1, _, xcr0, permission, _ = FACTS.unpack(raw)

    def bit(word: int, position: int) -> bool:
        return bool(word >> position & 1)

    def enabled(mask: int) -> bool:
        return bool(xcr0 & mask == mask)

    return CpuFacts(
        avx2=bit(ebx, 5),
        avx_vnni=bit(eax1, 4),
        avx512f=bit(ebx, 16),
        avx512bw=bit(ebx, 30),
        avx512vl=bit(ebx, 31),
        avx512_vnni=bit(ecx, 11),
        amx_tile=bit(edx, 24),
        amx_int8=bit(edx, 25),
        os_avx=enabled(0x6),  # XMM, YMM
        os_avx512=enabled(0xE6),  # and opmask, upper halves, ZMM16-31
        os_amx=enabled(0x60000),  # TILECFG, TILEDATA
        amx_permission=None if permission < 0 else permission,
    )


def read_cpu(ask_for_amx: bool = False) -> CpuFacts:
    """Ask the processor; replaced by tests. Raises LibraryUnavailable where the library does not load."""
    import ctypes

    library = LIBRARY.load()
    raw = ctypes.create_string_buffer(FACTS.pack(FACTS.size, *(0,) * 10), FACTS.size)
    library.int8moe_x86_probe(raw, int(ask_for_amx))
    return decode(raw.raw)


def refusal(tier: str, facts: CpuFacts) -> str | None:
    """Why ``tier`` cannot run on a machine with these facts; None when it can."""
    if tier == "avx2":
        return _first(
            (facts.avx2, "the CPU has no AVX2"),
            (facts.os_avx, "the system does not enable AVX state (XCR0)"),
        )
    if tier == "avx_vnni":
        return _first(
            (facts.avx2, "the CPU has no AVX2"),
            (facts.avx_vnni, "the CPU has no AVX-VNNI"),
            (facts.os_avx, "the system does not enable AVX state (XCR0)"),
        )
    if tier == "avx512_vnni":
        return _avx512_vnni(facts)
    if tier == "amx_int8":
        # Its float code and its small batches are those of avx512_vnni.
        return _first(
            (facts.amx_tile and facts.amx_int8, "the CPU has no AMX-INT8"),
            (facts.os_amx, "the system does not enable AMX state (XCR0)"),
            (not facts.amx_permission, f"AMX permission refused ({_errno_text(facts.amx_permission)})"),
        ) or _avx512_vnni(facts)
    raise ValueError(f"unknown tier {tier!r}; known: {', '.join(TIERS)}")


def _avx512_vnni(facts: CpuFacts) -> str | None:
    missing = [
        name for name, present in (("F", facts.avx512f), ("BW", facts.avx512bw), ("VL", facts.avx512vl)) if not present
    ]
    return _first(
        (not missing, f"the CPU has no AVX512{'/'.join(missing)}"),
        (facts.avx512_vnni, "the CPU has no AVX512-VNNI"),
        (facts.os_avx512, "the system does not enable AVX-512 state (XCR0)"),
    )


def _first(*conditions: tuple[bool, str]) -> str | None:
    return next((reason for holds, reason in conditions if not holds), None)


def _errno_text(code: int | None) -> str:
    # Linux counts the signal frames that AMX enlarges; its own word for this errno speaks of a device.
    if code == errno.ENOSPC:
        return "a thread's alternative signal stack is too small for it"
    return os.strerror(code) if code else "not asked"
