"""Entry point of group ``int8moe.kernels``: declares the tiers. Imports no torch."""

from __future__ import annotations

from typing import NamedTuple

from int8moe.contracts import ACTIVATIONS, HIDDEN_DTYPES, KernelSpec, Numerics
from int8moe.hookspecs import hookimpl
from int8moe.native import LibraryUnavailable

from . import probe
from .library import LAYOUT


class _Tier(NamedTuple):
    isa: tuple[tuple[str, ...], ...]  # words of /proc/cpuinfo
    priority: int
    experts: str  # class in experts.py


_TIERS = {
    "scalar": _Tier((), 30, "ScalarExperts"),
    "vx": _Tier((("vx",),), 40, "VxExperts"),
    "vxe": _Tier((("vx", "vxe"),), 50, "VxeExperts"),
}

isa_ladder = tuple(_TIERS)


def _reasons() -> dict[str, str | None]:
    """Why each tier cannot run here; None where it can."""
    try:
        facts = probe.read_cpu()
    except LibraryUnavailable as error:
        return dict.fromkeys(_TIERS, str(error))
    return {tier: probe.refusal(tier, facts) for tier in _TIERS}


@hookimpl
def register_kernels() -> list[KernelSpec]:
    """Declare every tier as a kernel ``s390x_vxe.<tier>``; one that cannot run here as unavailable, with the reason."""
    reasons = _reasons()
    return [
        KernelSpec(
            name=f"s390x_vxe.{name}",
            target=f"int8moe_s390x_vxe.experts:{tier.experts}",
            api_version=1,
            device="cpu",
            isa=tier.isa,
            activations=ACTIVATIONS,
            dtypes=HIDDEN_DTYPES,
            features=("bias", "no_gate", "expert_map", "apply_router_weight_on_input"),
            layout=LAYOUT.name,
            numerics=Numerics.bitwise(),
            priority=tier.priority,
            unavailable=reasons[name],
        )
        for name, tier in _TIERS.items()
    ]
