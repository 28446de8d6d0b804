"""Entry point of group ``int8moe.kernels``: declares the tiers. Imports no torch."""

from __future__ import annotations

from int8moe.contracts import KernelSpec
from int8moe.hookspecs import hookimpl
from int8moe.native import Tier, declare_tiers

from . import probe
from .library import LAYOUT, LIBRARY

_AVX512_VNNI = ("avx512f", "avx512bw", "avx512vl", "avx512_vnni")

# In the words of /proc/cpuinfo.
_TIERS = {
    "avx2": Tier((("avx2",),), 40, "Avx2Experts"),
    "avx_vnni": Tier((("avx2", "avx_vnni"),), 50, "AvxVnniExperts"),
    "avx512_vnni": Tier((_AVX512_VNNI,), 60, "Avx512VnniExperts"),
    "amx_int8": Tier(((*_AVX512_VNNI, "amx_tile", "amx_int8"),), 75, "AmxInt8Experts"),
}

isa_ladder = tuple(_TIERS)


@hookimpl
def register_kernels() -> list[KernelSpec]:
    """Declare every tier as a kernel ``x86_vnni.<tier>``; one that cannot run here as unavailable, with the reason.

    Linux grants the use of AMX to a process that asks, and to its threads; where the processor has it, this asks.
    """
    return declare_tiers(
        LIBRARY, LAYOUT, _TIERS, read_cpu=lambda: probe.read_cpu(ask_for_amx=True), refusal=probe.refusal
    )
