"""What a forward does on the host: it looks at no value on the device, so that a CUDA graph can hold it."""

from __future__ import annotations

import pytest
import torch
from compiled_launches import meta_forward, record, recorders

from int8moe.contracts import MoEConfig
from int8moe_triton_gpu import forward
from int8moe_triton_gpu.tiles import default_steps

CONFIG = MoEConfig(num_experts=16, top_k=4, hidden_size=256, intermediate_size=128)


def names(tokens: int, **changes: object) -> list[str]:
    config = CONFIG.model_copy(update=changes)
    return [launch.kernel for launch in record(config, tokens, torch.bfloat16, "sm_90")]


def test_few_tokens_are_not_sorted() -> None:
    """Tensors of device "meta" have no values: a look at one would raise."""
    few = ["quantize_rows", "place_experts", "grouped_gemm", "quantize_rows", "grouped_gemm", "combine"]
    assert names(1) == names(16) == few


def test_many_tokens_are() -> None:
    many = names(17)
    assert many[1:4] == ["place_experts", "lay_out_blocks", "place_slots"]
    assert len(many) == 8


def test_launches_depend_on_shapes_alone() -> None:
    assert record(CONFIG, 100, torch.bfloat16, "sm_90") == record(CONFIG, 100, torch.bfloat16, "sm_90")


@pytest.mark.parametrize("sizes", [(1, 2, 7, 16), (17, 18, 39, 64), (600, 1000, 1024)])
def test_another_number_of_tokens_is_no_other_kernel(sizes: tuple[int, ...]) -> None:
    """A server's batch is of another size at every call: what is compiled is the same while the step of tiles is."""
    short = {"hidden_size": 64, "intermediate_size": 48}  # several rows a program
    for changes in ({}, short, {"top_k": 1}, {"num_experts": 300}):
        config = CONFIG.model_copy(update=changes)
        steps = default_steps("sm_90")
        by_step: dict[object, set[object]] = {}
        for tokens in sizes:
            choice = steps.step(tokens * config.top_k, config.num_experts)
            by_step.setdefault(choice, set()).add(tuple(record(config, tokens, torch.bfloat16, "sm_90")))
        assert all(len(launches) == 1 for launches in by_step.values()), changes


def test_no_token_launches_nothing() -> None:
    assert names(0) == []


def test_more_tokens_than_scratch_go_in_chunks(monkeypatch) -> None:
    whole = names(200)
    monkeypatch.setattr(forward, "SCRATCH_BYTES", 150 * 2**10)
    chunked = names(200)
    assert len(chunked) > 2 * len(whole)
    assert chunked.count("combine") == chunked.count("grouped_gemm") // 2


class Blocks:
    """Stands for lay_out_blocks, and keeps how many blocks there are."""

    def __init__(self) -> None:
        self.given: list[int] = []

    def __getitem__(self, grid: tuple[int, ...]):
        return lambda counts, next_row, expert_of_block, blocks, *args, **kwargs: self.given.append(blocks)


@pytest.mark.parametrize(("tokens", "experts"), [(65, 16), (1000, 16), (65, 300), (4096, 1)])
def test_blocks_suffice_for_any_routing(tokens: int, experts: int) -> None:
    """The grid, made of shapes, holds the worst split of slots over experts."""
    block_m = default_steps("sm_90").step(tokens, experts).step.gate_up.block_m
    lonely = min(experts, tokens) - 1  # experts with one slot each; the last has all others
    worst = lonely + -(-(tokens - lonely) // block_m)
    blocks = Blocks()
    with recorders([]):
        forward.lay_out_blocks = blocks
        config = CONFIG.model_copy(update={"num_experts": experts, "top_k": 1})
        meta_forward(config, tokens, torch.float32, "sm_90")
    assert worst <= blocks.given[0] <= tokens
