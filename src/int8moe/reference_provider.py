"""The provider of ``reference.torch``, built into the core. Imports no torch."""

from __future__ import annotations

from .contracts import ACTIVATIONS, HIDDEN_DTYPES, KernelSpec, Numerics
from .hookspecs import hookimpl


@hookimpl
def register_kernels() -> list[KernelSpec]:
    """Declare the reference kernel: any machine, everything supported, lowest priority."""
    return [
        KernelSpec(
            name="reference.torch",
            target="int8moe.reference:ReferenceExperts",
            activations=ACTIVATIONS,
            dtypes=HIDDEN_DTYPES,
            features=("bias", "no_gate", "expert_map", "apply_router_weight_on_input"),
            layout="canonical",
            numerics=Numerics.bitwise(),
            priority=0,
        )
    ]
