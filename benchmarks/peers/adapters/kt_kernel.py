"""KTransformers' kernels, through the extension that kt-kernel chooses for this CPU."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from peer import Adapter, CannotRun, Peer
from shapes import Shape

if TYPE_CHECKING:
    from torch import Tensor

    from layer_data import Weights

# Under OMP_PROC_BIND the main thread, and with it every thread that kt-kernel starts, would share one core.
PEERS = (
    Peer("kt-kernel", "AMXInt8_MOE, quantised from bf16 at load", "kt-kernel", "KtInt8", bind_threads=False),
    Peer("kt-kernel-bf16", "its bf16 experts", "kt-kernel", "KtBf16", weight_bytes=2, bind_threads=False),
)


class KtAdapter(Adapter):
    """One pool of threads on NUMA node 0."""

    classes: tuple[str, ...] = ()
    """Names of the experts' class, the one that kt-kernel prefers first."""

    def __init__(self, shape: Shape, threads: int, max_tokens: int) -> None:
        super().__init__(shape, threads, max_tokens)
        kt_kernel = import_module("kt_kernel")
        extension = kt_kernel.kt_kernel_ext
        self.variant = kt_kernel.__cpu_variant__
        chosen = next((name for name in self.classes if hasattr(extension.moe, name)), None)
        if chosen is None:
            raise CannotRun(f"the {self.variant} build that kt-kernel loads on this CPU has no {self.classes[0]}")
        self.chosen = chosen
        self.moe = extension.moe
        config = extension.WorkerPoolConfig()
        config.subpool_count, config.subpool_numa_map, config.subpool_thread_count = 1, [0], [threads]
        self.pool = extension.CPUInfer(config)
        self.layers = 0

    def version(self) -> str:
        return f"kt-kernel {version('kt-kernel')}, {self.chosen}, {self.variant} build"

    def prepare_ids(self, topk_ids: Tensor) -> Tensor:
        return topk_ids.long()

    def point_at(self, config: Any, gate: Tensor, up: Tensor, down: Tensor) -> None:
        """Tell where the bf16 weights are: [E, I, H] twice and [E, H, I]."""
        raise NotImplementedError

    def pack(self, weights: Weights) -> Any:
        import torch

        w13, down = weights.bf16()
        gate, up = (half.contiguous() for half in w13.chunk(2, 1))
        del w13
        config = self.moe.MOEConfig(*self.shape, 0)
        config.max_len = max(self.max_tokens, 64)
        config.layer_idx = self.layers
        self.layers += 1
        self.point_at(config, gate, up, down)
        config.pool = self.pool.backend_
        layer = getattr(self.moe, self.chosen)(config)
        physical_experts = torch.arange(self.shape.num_experts, dtype=torch.int64)
        self.pool.submit(layer.load_weights_task(physical_experts.data_ptr()))
        self.pool.sync()
        return layer

    def run(self, packed: Any, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        import torch

        out = torch.empty_like(hidden_states)
        tokens = torch.tensor([hidden_states.shape[0]], dtype=torch.int32)
        self.pool.submit(
            packed.forward_task(
                tokens.data_ptr(),
                self.shape.top_k,
                topk_ids.data_ptr(),
                topk_weights.data_ptr(),
                hidden_states.data_ptr(),
                out.data_ptr(),
                False,
            )
        )
        self.pool.sync()
        return out


class KtInt8(KtAdapter):
    """Quantises while it loads; from these weights it arrives at the same int8 values."""

    classes = ("AMXInt8_MOE",)

    def point_at(self, config: Any, gate: Tensor, up: Tensor, down: Tensor) -> None:
        config.gate_proj, config.up_proj, config.down_proj = gate.data_ptr(), up.data_ptr(), down.data_ptr()


class KtBf16(KtAdapter):
    """Takes one pointer for each expert."""

    classes = ("AMXBF16_MOE", "AVX2BF16_MOE")

    def point_at(self, config: Any, gate: Tensor, up: Tensor, down: Tensor) -> None:
        config.gate_projs, config.up_projs, config.down_projs = (
            [[expert.data_ptr() for expert in weight]] for weight in (gate, up, down)
        )
        nothing = [[0] * self.shape.num_experts]
        config.gate_scales = config.up_scales = config.down_scales = nothing
