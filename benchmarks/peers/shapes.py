"""Sizes of the layers that are measured. Imports no torch: the runner and the workers share it."""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    """Sizes of one MoE layer with a gate (SiLU): w13 is [E, 2I, H], w2 is [E, H, I]."""

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int

    @property
    def weights(self) -> int:
        """Number of weights of all experts; the bytes of an int8 layer."""
        return 3 * self.num_experts * self.hidden_size * self.intermediate_size


SHAPES = {
    "qwen3-30b-a3b": Shape(128, 8, 2048, 768),
    "deepseek-v2-lite": Shape(64, 6, 2048, 1408),
    "mixtral-8x7b": Shape(8, 2, 4096, 14336),
    "gpt-oss-20b": Shape(32, 4, 2880, 2880),
    "olmoe": Shape(64, 8, 2048, 1024),
    "smoke": Shape(16, 2, 256, 128),
}


def parse_shape(text: str) -> Shape:
    """A name of the table, or four numbers ``E,K,H,I``.

    Raises:
        ValueError: with what was found and what is allowed.
    """
    if text in SHAPES:
        return SHAPES[text]
    allowed = f"a shape is E,K,H,I (experts, top_k, hidden and intermediate size) or one of {', '.join(SHAPES)}"
    words = text.split(",")
    if len(words) != len(Shape._fields) or not all(word.strip().isdecimal() for word in words):
        raise ValueError(f"{text!r} is no shape: {allowed}")
    shape = Shape(*map(int, words))
    if min(shape) < 1 or shape.top_k > shape.num_experts:
        raise ValueError(f"{text!r} cannot be: sizes start at 1 and top_k is at most the number of experts; {allowed}")
    return shape
