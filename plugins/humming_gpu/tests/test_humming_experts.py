"""What of the adapter runs without a device: sorting, summing, and which layers it takes."""

from __future__ import annotations

import pytest
import torch

from int8moe.contracts import HostInfo, MoEConfig
from int8moe.weights import ExpertWeights
from int8moe_humming_gpu import experts

HOST = HostInfo(machine="x86_64", system="Linux")


def config_of(**changes: object) -> MoEConfig:
    return MoEConfig(**({"num_experts": 4, "top_k": 2, "hidden_size": 128, "intermediate_size": 128} | changes))


@pytest.mark.parametrize("name", ["hidden_size", "intermediate_size"])
def test_shapes_that_would_need_padding_are_refused(name: str) -> None:
    answer = experts.HummingExperts().is_supported_config(config_of(**{name: 100}), HOST)
    assert not answer
    assert answer.reason == f"{name} 100 is not a multiple of 128"


@pytest.mark.parametrize(
    ("capability", "words"), [((7, 5), "the device is sm_75; sm_80 or newer is needed"), ((8, 0), None), ((9, 0), None)]
)
def test_devices(monkeypatch, capability: tuple[int, int], words: str | None) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    answer = experts.HummingExperts().is_supported_config(config_of(), HOST)
    assert bool(answer) is (words is None)
    if words is not None:
        assert answer.reason == words


def test_a_driver_that_does_not_work_is_a_reason(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "check the driver" in experts.HummingExperts().is_supported_config(config_of(), HOST).reason


def test_slots_are_sorted_as_the_package_wants_them() -> None:
    """The layout is where each expert's rows begin; slots that contribute nothing lie beyond the last."""
    layer = ExpertWeights(config_of())
    ids = torch.tensor([[3, 0], [-1, 3], [1, 9], [0, 2**40]])
    expert = experts.local_experts(layer, ids)
    assert expert.tolist() == [3, 0, 4, 3, 1, 4, 0, 4]
    order, starts = experts.sort_slots(expert, 4)
    assert starts.dtype == torch.int64
    assert starts.tolist() == [0, 2, 3, 3, 5]
    assert expert[order].tolist() == [0, 0, 1, 3, 3, 4, 4, 4]
    for number in range(4):
        assert (expert[order][starts[number] : starts[number + 1]] == number).all()


def test_an_expert_map_is_followed() -> None:
    config = config_of(has_expert_map=True, num_local_experts=2)
    layer = ExpertWeights(config, expert_map=torch.tensor([-1, 1, -1, 0], dtype=torch.int32))
    expert = experts.local_experts(layer, torch.tensor([[0, 1], [3, 4]]))
    assert expert.tolist() == [2, 1, 0, 2]


def test_rows_come_back_to_their_tokens() -> None:
    """A slot that was left out is not multiplied by 0: its row may hold anything."""
    expert = torch.tensor([1, 0, 4, 1])
    order, _ = experts.sort_slots(expert, 4)
    by_slot = torch.tensor([[1.0, 2.0], [10.0, 20.0], [float("nan"), float("inf")], [3.0, 4.0]])
    out = torch.empty(2, 2)
    experts.combine(by_slot[order], order, expert < 4, torch.tensor([[0.5, 0.25], [7.0, 2.0]]), out)
    assert out.tolist() == [[3.0, 6.0], [6.0, 8.0]]
