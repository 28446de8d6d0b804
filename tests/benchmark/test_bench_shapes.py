"""Model names, numbers, and what is refused."""

from __future__ import annotations

import pytest

from int8moe import MoEConfig
from int8moe.benchmark.roofline import expert_bytes, work_of
from int8moe.benchmark.shapes import SHAPES, Shape, parse_shape


def config(shape: Shape) -> MoEConfig:
    return MoEConfig(**shape._asdict())


@pytest.mark.parametrize("name", SHAPES)
def test_a_model_is_a_layer_that_can_be_made(name: str) -> None:
    shape = parse_shape(name)
    assert config(shape).num_experts == shape.num_experts >= shape.top_k


def test_numbers() -> None:
    assert parse_shape("8,2,256,128") == Shape(8, 2, 256, 128)
    assert parse_shape(" 8, 2, 256, 128", activation="gelu").activation == "gelu"


def test_fewer_experts() -> None:
    assert parse_shape("deepseek-v3", num_experts=16) == SHAPES["deepseek-v3"]._replace(num_experts=16)
    with pytest.raises(ValueError, match="7 experts of a shape that has 256 and sends a token to 8; give 8 to 256"):
        parse_shape("deepseek-v3", num_experts=7)
    with pytest.raises(ValueError, match="give 8 to 256"):
        parse_shape("deepseek-v3", num_experts=257)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("mixtral", "did you mean mixtral-8x7b"),
        ("nothing-like-it", "Names are qwen3-30b-a3b"),
        ("8,2,256", "four numbers above 0"),
        ("8", "four numbers above 0"),
        ("8,0,256,128", "four numbers above 0"),
        ("8,2,256,128.0", "four numbers above 0"),
        ("8,-2,256,128", "four numbers above 0"),
        ("2,3,256,128", "3 of 2 experts: give K from 1 to E"),
    ],
)
def test_what_is_no_shape(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_shape(text)


def test_the_work_of_a_call() -> None:
    """By hand: 2 tokens to 3 of 8 experts, H 10, I 4: three projections with a gate, two without."""
    gated = config(Shape(8, 3, 10, 4))
    assert expert_bytes(gated) == 3 * 10 * 4
    assert work_of(gated, 2, 5) == (2, 5, 5 * 120, 2 * 2 * 3 * 120)
    plain = config(Shape(8, 3, 10, 4, "relu2_no_mul"))
    assert work_of(plain, 2, 5) == (2, 5, 5 * 80, 2 * 2 * 3 * 80)
