"""Entry point of group ``int8moe.kernels``: declares the tiers. Imports no torch."""

from __future__ import annotations

from int8moe.contracts import KernelSpec
from int8moe.hookspecs import hookimpl
from int8moe.native import Tier, declare_tiers

from . import probe
from .library import LAYOUT, LIBRARY

# In the words of Linux, and in those of macOS.
_TIERS = {
    "neon": Tier((("asimd",), ("advsimd",)), 40, "NeonExperts"),
    "dotprod": Tier((("asimddp", "atomics"), ("feat_dotprod", "feat_lse")), 55, "DotprodExperts"),
    "i8mm": Tier((("i8mm", "atomics"), ("feat_i8mm", "feat_lse")), 70, "I8mmExperts"),
}

isa_ladder = tuple(_TIERS)


@hookimpl
def register_kernels() -> list[KernelSpec]:
    """Declare every tier as a kernel ``aarch64_neon.<tier>``; one that cannot run is unavailable, with the reason."""
    return declare_tiers(LIBRARY, LAYOUT, _TIERS, read_cpu=probe.read_cpu, refusal=probe.refusal)
