"""Entry point of group ``int8moe.kernels``: declares the kernel. Imports no torch and no humming."""

from __future__ import annotations

from int8moe.contracts import ACTIVATIONS, KernelSpec, Numerics
from int8moe.hookspecs import hookimpl

from . import probe

LAYOUT = "i8_humming"


@hookimpl
def register_kernels() -> list[KernelSpec]:
    """Declare ``humming_gpu.grouped_gemm``; used only when it is named: it is not bitwise, and never ran."""
    return [
        KernelSpec(
            name="humming_gpu.grouped_gemm",
            target="int8moe_humming_gpu.experts:HummingExperts",
            api_version=1,
            device="cuda",
            activations=ACTIVATIONS,
            dtypes=("bfloat16", "float16"),
            features=("no_gate", "expert_map", "apply_router_weight_on_input"),
            layout=LAYOUT,
            numerics=Numerics.tolerance(
                rtol=0.03,
                reason="weight scales and the results of both GEMMs are rounded to bf16 or fp16",
            ),
            priority=70,
            auto_select=False,
            unavailable=probe.refusal(probe.read_facts()),
        )
    ]
