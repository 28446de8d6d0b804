"""Calls of one point do the same work on other experts."""

from __future__ import annotations

import pytest
import torch

from int8moe import MoEConfig
from int8moe.benchmark.inputs import PointInputs
from int8moe.benchmark.request import ROUTINGS

CONFIG = MoEConfig(num_experts=32, top_k=3, hidden_size=16, intermediate_size=8, hidden_dtype="float32")


def rows_of_experts(ids: torch.Tensor) -> list[int]:
    return sorted(ids.flatten().bincount(minlength=CONFIG.num_experts).tolist())


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_every_call_has_the_same_work(routing: str, tokens: int) -> None:
    inputs = PointInputs(CONFIG, tokens, routing=routing, seed=3)
    assert inputs.hidden_states.shape == (tokens, 16)
    assert inputs.hidden_states.dtype == torch.float32
    assert inputs.topk_weights.shape == (tokens, 3)
    calls = [inputs.next_ids() for _ in range(4)]
    for ids in calls:
        assert ids.dtype == torch.int32
        assert ids.shape == (tokens, 3)
        assert 0 <= int(ids.min()) <= int(ids.max()) < 32
        assert all(len(set(row)) == 3 for row in ids.tolist())
        assert rows_of_experts(ids) == rows_of_experts(calls[0])
        assert ids.unique().numel() == inputs.work.touched_experts
    assert any(not torch.equal(ids, calls[0]) for ids in calls)


def test_the_routings_differ_in_what_they_touch() -> None:
    most = {name: max(rows_of_experts(PointInputs(CONFIG, 64, routing=name).next_ids())) for name in ROUTINGS}
    assert most["uniform"] < most["zipf"] < most["one"] == 64
    assert PointInputs(CONFIG, 64, routing="one").work.touched_experts == 3
    assert PointInputs(CONFIG, 64).work.touched_experts > 25


def test_a_seed_is_a_run() -> None:
    first, again, other = (PointInputs(CONFIG, 8, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.next_ids(), again.next_ids())
    assert torch.equal(first.hidden_states, again.hidden_states)
    assert not torch.equal(first.hidden_states, other.hidden_states)
