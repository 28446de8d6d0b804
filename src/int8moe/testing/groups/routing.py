"""Routing: empty slots, ids out of range, duplicates, expert maps, skew."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..bits import assert_same_bits
from ..case import Case, Grid
from ..makers import make_experts, make_hidden_states, make_routing
from ..target import Target


def _check(
    target: Target, ids: Tensor, *, weights: Tensor | None = None, expert_map: Tensor | None = None, **fields: Any
) -> tuple[Tensor, Tensor]:
    """Compare one routing for every dtype; return ids and the last result."""
    config = target.config(
        top_k=ids.shape[1],
        has_expert_map=expert_map is not None,
        num_local_experts=None if expert_map is None else int(expert_map.max()) + 1,
        **fields,
    )
    experts = make_experts(config, seed=3)
    layer = target.layer(config, experts, expert_map=expert_map)
    if weights is None:
        weights = make_routing(len(ids), config.num_experts, ids.shape[1], seed=4, distinct=False)[0]
    output = torch.empty(0)
    for dtype in target.dtypes:
        x = make_hidden_states(len(ids), config.hidden_size, dtype=dtype, seed=5)
        kept = ids.clone(), weights.clone(), x.clone()
        output = target.check(layer, experts, (x, weights, ids), expert_map=expert_map, context=str(dtype))
        for before, after in zip(kept, (ids, weights, x), strict=True):
            assert_same_bits(after, before, "inputs are unchanged")
        output = target.forward(layer, x, weights, ids)
    return ids, output


def _left_out(target: Target, ids_dtype: torch.dtype) -> None:
    ids = torch.tensor([[-1, -1], [0, -1], [1, 0], [-1, 3]], dtype=ids_dtype)
    _, output = _check(target, ids)
    assert_same_bits(output[0], torch.zeros_like(output[0]), "a token with no slot left is exactly zero")


def _all_left_out(target: Target, tokens: int) -> None:
    _, output = _check(target, torch.full((tokens, 2), -1))
    assert_same_bits(output, torch.zeros_like(output), "no slot left")


def _out_of_range(target: Target, ids_dtype: torch.dtype) -> None:
    limits = torch.iinfo(ids_dtype)
    ids = torch.tensor(
        [[0, 4], [-2, 1], [limits.max, limits.min], [5, 3], [-(2**31), 2], [2**31 - 1, 0], [3, 3]],
        dtype=torch.int64,
    ).to(ids_dtype)
    _check(target, ids)
    if ids_dtype == torch.int64:  # must not be cut to 32 bits, where they would name experts
        wide = torch.tensor([[2**32, 0], [2**32 + 1, -(2**32)], [2**40 + 3, 1]])
        _check(target, wide)


def _nan_weight_of_left_out_slot(target: Target) -> None:
    ids = torch.tensor([[-1, 0], [9, 1], [2, 3]])
    weights = torch.tensor([[float("nan"), 0.5], [float("inf"), 0.25], [0.5, 0.75]])
    _, output = _check(target, ids, weights=weights)
    assert not bool(torch.isnan(output).any()), "a left-out slot contributes nothing, not even its NaN weight"


def _weights(target: Target) -> None:
    """Zero, negative, large, NaN and infinite router weights of slots that count."""
    nan, inf = float("nan"), float("inf")
    weights = torch.tensor([[0.0, -0.0], [-1.0, 0.5], [1e30, 1e-30], [nan, 1.0], [inf, 0.5], [1e-40, 1e-45]])
    _check(target, torch.tensor([[0, 1], [2, 3], [1, 0], [3, 2], [0, 1], [1, 2]]), weights=weights)


def _duplicates(target: Target) -> None:
    _check(target, torch.tensor([[0, 0], [3, 3], [1, 0], [2, 2]]))
    _check(target, torch.tensor([[1, 0, 1], [2, 2, 2], [3, -1, 3]]))


def _slot_order(target: Target) -> None:
    """Slots are added by ascending expert id, equal ids by slot: any order of the columns gives the same bits."""
    config = target.config(num_experts=6, top_k=4)
    experts = make_experts(config, seed=6)
    layer = target.layer(config, experts)
    inputs = target.inputs(config, 33, seed=7)
    expected = target.check(layer, experts, inputs)
    for columns in ([3, 2, 1, 0], [1, 0, 3, 2], [2, 3, 0, 1]):
        x, weights, ids = inputs
        target.match(target.forward(layer, x, weights[:, columns], ids[:, columns]), expected, f"columns {columns}")


def _skew(target: Target, tokens: int, expert: int, num_experts: int) -> None:
    _check(target, torch.full((tokens, 1), expert), num_experts=num_experts)


def _skew_two(target: Target, tokens: int) -> None:
    """One expert has nearly all rows, the others one each."""
    ids = torch.full((tokens, 2), 5)
    ids[:, 1] = -1
    ids[:8, 1] = torch.arange(8)
    _check(target, ids, num_experts=8)


def _idle(target: Target) -> None:
    _check(target, torch.tensor([[1, 6], [6, 1]]), num_experts=8)
    _check(target, torch.tensor([[63]]), num_experts=64)


def _single_expert(target: Target, tokens: int) -> None:
    _check(target, torch.zeros(tokens, 1, dtype=torch.int32), num_experts=1)


def _wide(target: Target, top_k: int, tokens: int, num_experts: int) -> None:
    ids = make_routing(tokens, num_experts, top_k, seed=top_k)[1]
    _check(target, ids, num_experts=num_experts)


def _many_experts(target: Target) -> None:
    for num_experts, top_k in ((256, 8), (512, 10)):
        ids = make_routing(40, num_experts, top_k, seed=1)[1]
        _check(target, ids, num_experts=num_experts, hidden_size=32, intermediate_size=16)


def _empty(target: Target, top_k: int) -> None:
    _, output = _check(target, torch.empty(0, top_k, dtype=torch.int32))
    assert output.shape == (0, 64), f"shape is {list(output.shape)}, expected [0, 64]"


def _mapped(target: Target, mapping: list[int], tokens: int, dtype: torch.dtype) -> None:
    ids = make_routing(tokens, len(mapping), 2, seed=tokens)[1]
    ids[0, 0] = -1
    ids[-1, -1] = len(mapping)
    _check(target, ids, expert_map=torch.tensor(mapping, dtype=dtype), num_experts=len(mapping))


def _map_order(target: Target) -> None:
    """The order of step 8 is that of global ids, also where local ids run the other way."""
    _check(
        target,
        torch.tensor([[0, 1, 2], [2, 1, 0], [3, 0, 1], [1, 3, 3]]),
        expert_map=torch.tensor([3, 2, 1, 0], dtype=torch.int32),
    )


def _on_input(target: Target, tokens: int) -> None:
    """The router weight on the input: other bits than on the output, and the caller's x stays."""
    fields: dict[str, Any] = {"hidden_size": 65, "num_experts": 3}
    ids = make_routing(tokens, 3, 1, seed=tokens)[1]
    weights = torch.full((tokens, 1), 0.5)
    weights[0] = 0.3
    _, on_input = _check(target, ids, weights=weights, apply_router_weight_on_input=True, **fields)
    _, on_output = _check(target, ids, weights=weights, **fields)
    assert not torch.equal(on_input, on_output), "the flag makes no difference"


def cases(grid: Grid) -> Iterator[Case]:
    """Make the cases."""
    makers: dict[str, Callable[[Target], None]] = {
        "nan-weight-of-left-out-slot": _nan_weight_of_left_out_slot,
        "odd-weights": _weights,
        "duplicates": _duplicates,
        "slot-order": _slot_order,
        "idle-experts": _idle,
        "many-experts": _many_experts,
        "map-order": _map_order,
    }
    for dtype in (torch.int32, torch.int64):
        word = str(dtype).removeprefix("torch.")
        makers[f"left-out-{word}"] = functools.partial(_left_out, ids_dtype=dtype)
        makers[f"out-of-range-{word}"] = functools.partial(_out_of_range, ids_dtype=dtype)
        makers[f"map-{word}"] = functools.partial(_mapped, mapping=[-1, 1, -1, 0], tokens=18, dtype=dtype)
    for tokens in (1, 40):
        makers[f"all-left-out-M{tokens}"] = functools.partial(_all_left_out, tokens=tokens)
        makers[f"on-input-M{tokens}"] = functools.partial(_on_input, tokens=tokens)
    for tokens in (1, 3, 16, 64, 300) if grid != "reduced" else (1, 40):
        makers[f"one-expert-M{tokens}"] = functools.partial(_single_expert, tokens=tokens)
        makers[f"skew-M{tokens}"] = functools.partial(_skew, tokens=tokens, expert=7, num_experts=8)
    makers["skew-and-one-each"] = functools.partial(_skew_two, tokens=129)
    for top_k in (1, 3, 5, 8, 10, 16):
        makers[f"empty-k{top_k}"] = functools.partial(_empty, top_k=top_k)
        for tokens in (1, 2, 37):
            makers[f"top{top_k}-M{tokens}"] = functools.partial(_wide, top_k=top_k, tokens=tokens, num_experts=16)
    makers["top8-of-8"] = functools.partial(_wide, top_k=8, tokens=9, num_experts=8)
    makers["top8-of-3"] = functools.partial(_wide, top_k=8, tokens=9, num_experts=3)
    for number, mapping in enumerate([[0], [-1, 0], [2, -1, 0, 1, -1], [0, 1, 2, 3]]):
        makers[f"map-{number}"] = functools.partial(_mapped, mapping=mapping, tokens=11, dtype=torch.int32)
    for name, run in makers.items():
        yield Case("routing", name, run)
