"""What is to be measured. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from .shapes import Shape

ROUTINGS = {
    "uniform": "each token goes to top_k experts, all equally likely",
    "zipf": "the same with the popularity of the r-th expert as 1 / r",
    "one": "every token goes to the same top_k experts",
}

FEWEST_ROUNDS = 7
"""Medians of fewer alternations say little on a machine that others use, too."""


@dataclass(frozen=True)
class Request:
    """One run of the benchmark.

    Attributes:
        shape_name: as the user gave it.
        shape: the layer's sizes.
        full_num_experts: experts that the shape has before it was reduced.
        tokens: M of each point.
        kernels: names, compared in that order with the first; the same name twice is a noise check. () = the best.
        dtype: of the hidden states, one of ``int8moe.contracts.HIDDEN_DTYPES``.
        routing: one of :data:`ROUTINGS`.
        threads: workers; None = those that int8moe uses by itself.
        rounds: least alternations a point.
        seconds: a point goes on for at least that long.
        gigabytes: 10**9 bytes of weights to rotate over, of each kernel.
        seed: of routing and hidden states.
        overhead: whether the cost of a call on a tiny layer is measured, too.
    """

    shape_name: str
    shape: Shape
    full_num_experts: int
    tokens: tuple[int, ...] = (1, 4, 16, 64, 256)
    kernels: tuple[str, ...] = ()
    dtype: str = "bfloat16"
    routing: str = "uniform"
    threads: int | None = None
    rounds: int = 15
    seconds: float = 1.0
    gigabytes: float = 2.0
    seed: int = 0
    overhead: bool = False
