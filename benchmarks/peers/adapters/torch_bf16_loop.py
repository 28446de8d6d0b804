"""A loop over experts with bf16 ``F.linear``: a model's plain forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from expert_loop import ExpertLoop
from peer import Peer

if TYPE_CHECKING:
    from torch import Tensor

    from layer_data import Weights

PEERS = (Peer("torch-bf16-loop", "F.linear per expert, bf16", "torch", "Bf16Loop", weight_bytes=2, own_python=True),)


class Bf16Loop(ExpertLoop):
    """Weights as they are: [E, 2I, H] and [E, H, I] bfloat16."""

    def pack(self, weights: Weights) -> Any:
        return weights.bf16()

    def expert(self, packed: Any, expert: int, rows: tuple[Tensor, ...]) -> Tensor:
        import torch.nn.functional as F

        w13, w2 = packed
        gate, up = F.linear(rows[0], w13[expert]).chunk(2, -1)
        return F.linear(F.silu(gate) * up, w2[expert])
