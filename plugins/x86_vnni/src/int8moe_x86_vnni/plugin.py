"""Entry point of group ``int8moe.kernels``: declares the tiers. Imports no torch."""

from __future__ import annotations

from int8moe.contracts import ACTIVATIONS, HIDDEN_DTYPES, KernelSpec, Numerics
from int8moe.hookspecs import hookimpl
from int8moe.native import LibraryUnavailable

from . import probe
from .library import LAYOUT, LIBRARY

isa_ladder = ("avx2", "avx_vnni", "avx512_vnni", "amx_int8")

_AVX512_VNNI = ("avx512f", "avx512bw", "avx512vl", "avx512_vnni")

# tier: (words of /proc/cpuinfo, priority, class in experts.py)
_TIERS = {
    "avx2": (("avx2",), 40, "Avx2Experts"),
    "avx_vnni": (("avx2", "avx_vnni"), 50, "AvxVnniExperts"),
    "avx512_vnni": (_AVX512_VNNI, 60, "Avx512VnniExperts"),
    "amx_int8": ((*_AVX512_VNNI, "amx_tile", "amx_int8"), 75, "AmxInt8Experts"),
}


def _reasons() -> dict[str, str | None]:
    """Why each tier cannot run here; None where it can.

    Linux grants the use of AMX to a process that asks, and to its threads; where the processor has it, this asks.
    """
    try:
        built = LIBRARY.built_tiers()
        facts = probe.read_cpu(ask_for_amx=True)
    except LibraryUnavailable as error:
        return dict.fromkeys(_TIERS, str(error))
    return {tier: probe.refusal(tier, facts) or (None if tier in built else LIBRARY.not_built) for tier in _TIERS}


@hookimpl
def register_kernels() -> list[KernelSpec]:
    """Declare every tier as a kernel ``x86_vnni.<tier>``; one that cannot run here as unavailable, with the reason."""
    reasons = _reasons()
    return [
        KernelSpec(
            name=f"x86_vnni.{tier}",
            target=f"int8moe_x86_vnni.experts:{experts}",
            api_version=1,
            device="cpu",
            isa=(isa,),
            activations=ACTIVATIONS,
            dtypes=HIDDEN_DTYPES,
            features=("bias", "no_gate", "expert_map", "apply_router_weight_on_input"),
            layout=LAYOUT.name,
            numerics=Numerics.bitwise(),
            priority=priority,
            unavailable=reasons[tier],
        )
        for tier, (isa, priority, experts) in _TIERS.items()
    ]
