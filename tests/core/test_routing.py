"""Router logits to experts: what the arguments mean, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from int8moe.errors import ConfigError, UnsupportedInputError
from int8moe.routing import select_experts


def test_equal_scores_go_to_the_lower_id_and_rounding_makes_none_equal() -> None:
    weights, ids = select_experts(torch.tensor([[0.0, 1.0, 1.0, 0.0], [-300.0, -200.0, 0.0, -400.0]]), 3)
    assert ids.tolist() == [[1, 2, 0], [2, 1, 0]]  # the scores of the second token are 0 but for one
    assert weights[0, 0] == weights[0, 1]
    assert weights[1].tolist() == [1.0, 0.0, 0.0]


def test_only_the_strongest_groups_are_chosen_from() -> None:
    logits = torch.tensor([[5.0, -9.0, 2.0, 3.0, 4.0, -8.0]])
    assert select_experts(logits, 2)[1].tolist() == [[0, 4]]
    assert select_experts(logits, 2, num_expert_group=3, topk_group=1)[1].tolist() == [[0, 1]]  # by the best score
    nothing = torch.zeros(6)  # with a bias, of whatever value, by the sum of the best two
    _, ids = select_experts(
        logits, 2, scoring="sigmoid", num_expert_group=3, topk_group=1, e_score_correction_bias=nothing
    )
    assert ids.tolist() == [[3, 2]]


def test_the_bias_chooses_and_does_not_weigh() -> None:
    logits, bias = torch.zeros(1, 3), torch.tensor([0.0, 2.0, 1.0])
    weights, ids = select_experts(
        logits, 2, scoring="sigmoid", renormalize=False, e_score_correction_bias=bias, routed_scaling_factor=3.0
    )
    assert ids.tolist() == [[1, 2]]
    assert weights.tolist() == [[1.5, 1.5]]


def test_no_score_left_gives_zeros() -> None:
    weights, _ = select_experts(torch.full((1, 4), -200.0), 2, scoring="sigmoid")
    assert weights.tolist() == [[0.0, 0.0]]


def test_no_tokens() -> None:
    weights, ids = select_experts(torch.empty(0, 8), 2, num_expert_group=4, topk_group=2)
    assert weights.shape == ids.shape == (0, 2)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"scoring": "tanh"}, "scoring='tanh' is not supported; give 'softmax' or 'sigmoid'"),
        ({"num_expert_group": 3}, "num_expert_group=3: give a number that divides 8"),
        ({"num_expert_group": 0}, "num_expert_group=0: give a number that divides 8"),
        ({"num_expert_group": 4, "topk_group": 5}, "topk_group=5: give a number from 1 to 4"),
        ({"top_k": 5, "num_expert_group": 4, "topk_group": 2}, "top_k=5: give a number from 1 to 4, the experts of 2"),
        ({"top_k": 9}, "top_k=9: give a number from 1 to 8, the number of experts"),
        ({"num_expert_group": 8, "topk_group": 3, "e_score_correction_bias": torch.zeros(8)}, "makes groups of 1"),
    ],
)
def test_refused_counts(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text.replace("(", r"\(")):
        select_experts(torch.zeros(1, 8), **({"top_k": 2} | arguments))


@pytest.mark.parametrize("bias", [torch.zeros(7), torch.zeros(8, dtype=torch.int32)])
def test_refused_bias(bias: torch.Tensor) -> None:
    with pytest.raises(UnsupportedInputError, match=r"give floats \[8\], one an expert"):
        select_experts(torch.zeros(1, 8), 2, e_score_correction_bias=bias)
