"""int8moe itself, as its README shows it. INT8MOE_KERNEL and INT8MOE_MAX_ISA choose the kernel."""

from __future__ import annotations

import ctypes
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from peer import Adapter, CannotRun, Peer
from shapes import Shape

if TYPE_CHECKING:
    from torch import Tensor

    from layer_data import Weights

# Binding by OpenMP leaves the main thread one core, which is then all that int8moe takes its share to be.
_THREADS = (("INT8MOE_NUM_THREADS", "{threads}"),)
_PR_SET_THP_DISABLE = 41

PEERS = (
    Peer("int8moe", "FusedMoE", "int8moe", "Int8MoELayer", variables=_THREADS, own_python=True),
    Peer(
        "int8moe-4k",
        "FusedMoE whose process is refused huge pages",
        "int8moe",
        "Int8MoEOnSmallPages",
        variables=_THREADS,
        own_python=True,
    ),
)


class Int8MoELayer(Adapter):
    """``int8moe.FusedMoE``, which asks for huge pages."""

    def __init__(self, shape: Shape, threads: int, max_tokens: int) -> None:
        super().__init__(shape, threads, max_tokens)
        import int8moe

        self.config = int8moe.MoEConfig(**shape._asdict(), hidden_dtype="bfloat16")
        self.kernel = ""

    def version(self) -> str:
        return f"int8moe {version('int8moe')}, {self.kernel}"

    def pack(self, weights: Weights) -> Any:
        import int8moe

        layer = int8moe.FusedMoE(self.config)
        layer.load_weights(
            w13_weight=weights.w13,
            w13_weight_scale=weights.w13_scale,
            w2_weight=weights.w2,
            w2_weight_scale=weights.w2_scale,
        )
        layer.process_weights_after_loading()
        self.kernel = layer.kernel.name
        return layer

    def run(self, packed: Any, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        out: Tensor = packed(hidden_states, topk_weights, topk_ids)
        return out


class Int8MoEOnSmallPages(Int8MoELayer):
    """The same without huge pages: what they are worth to it, and how it stands to peers that do not ask for them."""

    def __init__(self, shape: Shape, threads: int, max_tokens: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if sys.platform != "linux" or libc.prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0) != 0:
            raise CannotRun("this system has no switch that keeps a process from huge pages")
        super().__init__(shape, threads, max_tokens)
