"""Entry point of group ``int8moe.kernels``: declares the tiers. Imports no torch."""

from __future__ import annotations

from int8moe.contracts import ACTIVATIONS, HIDDEN_DTYPES, KernelSpec, Numerics
from int8moe.hookspecs import hookimpl
from int8moe.native import LibraryUnavailable

from . import probe
from .library import LAYOUT, LIBRARY

isa_ladder = ("neon", "dotprod", "i8mm")

# tier: (feature sets in the words of Linux and of macOS, priority, class in experts.py)
_TIERS = {
    "neon": ((("asimd",), ("advsimd",)), 40, "NeonExperts"),
    "dotprod": ((("asimddp", "atomics"), ("feat_dotprod", "feat_lse")), 55, "DotprodExperts"),
    "i8mm": ((("i8mm", "atomics"), ("feat_i8mm", "feat_lse")), 70, "I8mmExperts"),
}


def _reasons() -> dict[str, str | None]:
    """Why each tier cannot run here; None where it can."""
    try:
        built = LIBRARY.built_tiers()
        facts = probe.read_cpu()
    except LibraryUnavailable as error:
        return dict.fromkeys(_TIERS, str(error))
    return {tier: probe.refusal(tier, facts) or (None if tier in built else LIBRARY.not_built) for tier in _TIERS}


@hookimpl
def register_kernels() -> list[KernelSpec]:
    """Declare every tier as a kernel ``aarch64_neon.<tier>``; one that cannot run is unavailable, with the reason."""
    reasons = _reasons()
    return [
        KernelSpec(
            name=f"aarch64_neon.{tier}",
            target=f"int8moe_aarch64_neon.experts:{experts}",
            api_version=1,
            device="cpu",
            isa=isa,
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
