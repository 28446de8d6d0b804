"""Entry point of group ``int8moe.kernels``: declares the kernel. Imports neither torch nor triton."""

from __future__ import annotations

from int8moe.contracts import ACTIVATIONS, HIDDEN_DTYPES, KernelSpec, Numerics
from int8moe.hookspecs import hookimpl

from . import probe

NUMERICS_VERSION = 1
"""Of docs/numerics.md, which the kernels translate."""


@hookimpl
def register_kernels() -> list[KernelSpec]:
    """Declare ``triton_gpu.grouped_gemm``: for torch's device "cuda", which NVIDIA's and AMD's builds share.

    Under TRITON_INTERPRET=1 it is a kernel for CPU tensors instead, for tests: slow, and used only when it is named.
    """
    facts = probe.read_facts()
    return [
        KernelSpec(
            name="triton_gpu.grouped_gemm",
            target="int8moe_triton_gpu.experts:GroupedGemmExperts",
            api_version=1,
            device="cpu" if facts.interpreted else "cuda",
            activations=ACTIVATIONS,
            dtypes=HIDDEN_DTYPES,
            features=("bias", "no_gate", "expert_map", "apply_router_weight_on_input"),
            layout="canonical",
            numerics=Numerics.bitwise(version=NUMERICS_VERSION),
            priority=80,
            auto_select=not facts.interpreted,
            unavailable=probe.refusal(facts),
        )
    ]
