"""The MoE layers of well-known models, by name. Imports no torch."""

from __future__ import annotations

from typing import NamedTuple

from ..near_names import near_names


class Shape(NamedTuple):
    """Sizes of one MoE layer, as the model's config.json has them.

    Attributes:
        num_experts: E.
        top_k: experts a token.
        hidden_size: H.
        intermediate_size: I.
        activation: one of ``int8moe.contracts.ACTIVATIONS``.
        has_bias: both projections add one.
    """

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    activation: str = "silu"
    has_bias: bool = False


SHAPES = {
    "qwen3-30b-a3b": Shape(128, 8, 2048, 768),
    "qwen3-235b-a22b": Shape(128, 8, 4096, 1536),
    "deepseek-v2-lite": Shape(64, 6, 2048, 1408),
    "deepseek-v3": Shape(256, 8, 7168, 2048),
    "mixtral-8x7b": Shape(8, 2, 4096, 14336),
    "gpt-oss-20b": Shape(32, 4, 2880, 2880, "swigluoai", has_bias=True),
    "gpt-oss-120b": Shape(128, 4, 2880, 2880, "swigluoai", has_bias=True),
    "olmoe": Shape(64, 8, 2048, 1024),
    "smoke": Shape(16, 2, 256, 128),
}

NUMBERS = "E,K,H,I (experts, experts a token, hidden size, intermediate size)"


def parse_shape(text: str, *, activation: str | None = None, num_experts: int | None = None) -> Shape:
    """The shape of a name in :data:`SHAPES`, or of four numbers ``E,K,H,I``.

    Args:
        text: name or numbers.
        activation: instead of the shape's own.
        num_experts: so many of its experts only.

    Raises:
        ValueError: what was found, and what is allowed.
    """
    shape = SHAPES.get(text) or _from_numbers(text)
    if num_experts is not None:
        if not shape.top_k <= num_experts <= shape.num_experts:
            raise ValueError(
                f"{num_experts} experts of a shape that has {shape.num_experts} and sends a token to {shape.top_k}; "
                f"give {shape.top_k} to {shape.num_experts}"
            )
        shape = shape._replace(num_experts=num_experts)
    return shape if activation is None else shape._replace(activation=activation)


def _from_numbers(text: str) -> Shape:
    words = [word.strip() for word in text.split(",")]
    if len(words) == 1 and not words[0].isdecimal():
        near = near_names(text, SHAPES, count=2)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ValueError(f"there is no shape {text!r}; {hint}Names are {', '.join(SHAPES)}; or give {NUMBERS}")
    if len(words) != 4 or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ValueError(f"{text!r} is not a shape: give four numbers above 0, {NUMBERS}")
    experts, top_k, hidden, inner = map(int, words)
    shape = Shape(experts, top_k, hidden, inner)
    if shape.top_k > shape.num_experts:
        raise ValueError(
            f"{text!r} sends a token to {shape.top_k} of {shape.num_experts} experts: give K from 1 to E in {NUMBERS}"
        )
    return shape
