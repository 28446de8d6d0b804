"""A loop over experts in Python, as a model's own forward has it: the frame of peers that bring only a linear."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from peer import Adapter

if TYPE_CHECKING:
    from torch import Tensor


class ExpertLoop(Adapter):
    """Tokens sorted by expert, one call of :meth:`expert` for each expert that has some."""

    def version(self) -> str:
        import torch

        return f"torch {torch.__version__}"

    def activations(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        """What :meth:`expert` gets rows of; [M, ...] each."""
        return (hidden_states,)

    def expert(self, packed: Any, expert: int, rows: tuple[Tensor, ...]) -> Tensor:
        """Both projections of one expert for its rows [n, ...].

        Returns:
            [n, H], float.
        """
        raise NotImplementedError

    def run(self, packed: Any, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        import torch

        out = torch.zeros(hidden_states.shape, dtype=torch.float32)
        activations = self.activations(hidden_states)
        flat = topk_ids.flatten().long()
        order = flat.argsort()
        tokens = order // self.shape.top_k
        weights = topk_weights.flatten()[order].unsqueeze(1)
        start = 0
        for expert, count in enumerate(torch.bincount(flat, minlength=self.shape.num_experts).tolist()):
            if count:
                end = start + count
                chosen = tokens[start:end]
                y = self.expert(packed, expert, tuple(rows[chosen] for rows in activations))
                out.index_add_(0, chosen, y.float().mul_(weights[start:end]))
                start = end
        return out.bfloat16()
