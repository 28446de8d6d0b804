"""torch's grouped matmul over the tokens sorted by expert, in bf16."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from peer import Adapter, CannotRun, Peer
from shapes import Shape

if TYPE_CHECKING:
    from torch import Tensor

    from layer_data import Weights

PEERS = (Peer("torch-grouped-bf16", "F.grouped_mm, bf16", "torch", "GroupedBf16", weight_bytes=2, own_python=True),)


class GroupedBf16(Adapter):
    """Two calls of ``grouped_mm`` a layer."""

    def __init__(self, shape: Shape, threads: int, max_tokens: int) -> None:
        super().__init__(shape, threads, max_tokens)
        import torch

        grouped_mm = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
        if grouped_mm is None:
            raise CannotRun(f"torch {torch.__version__} has no grouped_mm")
        self.grouped_mm = grouped_mm

    def version(self) -> str:
        import torch

        return f"torch {torch.__version__}"

    def pack(self, weights: Weights) -> Any:
        w13, w2 = weights.bf16()
        return w13.transpose(1, 2), w2.transpose(1, 2)

    def run(self, packed: Any, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        import torch
        import torch.nn.functional as F

        w13, w2 = packed
        flat = topk_ids.flatten().long()
        order = flat.argsort()
        tokens = order // self.shape.top_k
        ends = torch.bincount(flat, minlength=self.shape.num_experts).cumsum(0).int()
        gate, up = self.grouped_mm(hidden_states[tokens], w13, offs=ends).chunk(2, -1)
        y = self.grouped_mm(F.silu(gate) * up, w2, offs=ends)
        y = y.float().mul_(topk_weights.flatten()[order].unsqueeze(1))
        return torch.zeros(hidden_states.shape).index_add_(0, tokens, y).bfloat16()
