"""Entry point of group ``int8moe.kernels``: declares the tiers. Imports no torch."""

from __future__ import annotations

from int8moe.contracts import ACTIVATIONS, HIDDEN_DTYPES, KernelSpec, Numerics
from int8moe.hookspecs import hookimpl

from . import probe
from .library import LAYOUT_NAME, NUMERICS_VERSION, LibraryUnavailable

isa_ladder = ("avx2", "avx512_vnni")

# tier: (words of /proc/cpuinfo, priority, class in experts.py)
_TIERS = {
    "avx2": (("avx2",), 40, "Avx2Experts"),
    "avx512_vnni": (("avx512f", "avx512bw", "avx512vl", "avx512_vnni"), 60, "Avx512VnniExperts"),
}


def _reasons() -> dict[str, str | None]:
    """Why each tier cannot run here; None where it can."""
    try:
        facts = probe.read_cpu()
    except LibraryUnavailable as error:
        return dict.fromkeys(_TIERS, str(error))
    return {tier: probe.refusal(tier, facts) for tier in _TIERS}


@hookimpl
def register_kernels() -> list[KernelSpec]:
    """Declare ``x86_vnni.avx2`` and ``x86_vnni.avx512_vnni``; on another machine as unavailable, with the reason."""
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
            layout=LAYOUT_NAME,
            numerics=Numerics.bitwise(version=NUMERICS_VERSION),
            priority=priority,
            unavailable=reasons[tier],
        )
        for tier, (isa, priority, experts) in _TIERS.items()
    ]
