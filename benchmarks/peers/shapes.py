"""Sizes of the layer, as the runner and the workers know them. Imports nothing: it runs in foreign environments too."""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    """Sizes of one MoE layer with a gate (SiLU) and no biases: w13 is [E, 2I, H], w2 is [E, H, I]."""

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int

    @property
    def weights(self) -> int:
        """Number of weights of all experts; the bytes of an int8 layer."""
        return 3 * self.num_experts * self.hidden_size * self.intermediate_size
