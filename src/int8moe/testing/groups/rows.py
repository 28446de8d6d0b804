"""The optional hook apply_rows, through ``forward_sorted``: un-weighted rows of step 7, sorted by expert."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import get_args

import torch

from ...contracts import Activation, MoEConfig
from ...reference import quantize_rows, sorted_rows
from ..bits import assert_same_bits
from ..case import Case, Grid, skip
from ..makers import make_experts, make_hidden_states, reference_output, threads
from ..target import Target

_COUNTS: dict[str, list[int]] = {
    "even": [3, 3, 3, 3],
    "idle": [0, 5, 0, 2],
    "one": [0, 0, 0, 40],
    "first": [1, 0, 0, 0],
    "none": [0, 0, 0, 0],
    "mixed": [17, 1, 33, 2],
}


def _need_rows(target: Target) -> None:
    if target.bound.apply_rows is None:
        skip("the kernel has no apply_rows hook")


def _sorted_rows(target: Target, counts: str, activation: Activation, bias: bool) -> None:
    _need_rows(target)
    number = _COUNTS[counts]
    total = sum(number)
    config = MoEConfig(
        num_experts=4, top_k=2, hidden_size=67, intermediate_size=33, activation=activation, has_bias=bias
    )
    experts = make_experts(config, seed=51)
    layer = target.layer(config, experts)
    for index, dtype in enumerate(target.dtypes):
        rows = make_hidden_states(total, 67, dtype=dtype, seed=52)
        q, scales = quantize_rows(rows.to(torch.float32))
        expected = sorted_rows(experts, config, q, scales, number)
        per_expert = torch.tensor(number, dtype=(torch.int64, torch.int32)[index % 2])
        kept = rows.clone()
        for threads_ in target.threads:
            context = f"{dtype}, threads {threads_}"
            with threads(threads_):
                target.match(target.forward_rows(layer, rows, per_expert), expected, context)
                actual = target.forward_rows(layer, q, per_expert, scales)
                target.match(actual, expected, f"int8 rows, {context}")
                wide = torch.zeros(total, 80, dtype=dtype)[:, 5:72]
                wide.copy_(rows)
                target.match(target.forward_rows(layer, wide, per_expert), expected, f"column slice, {context}")
        assert_same_bits(rows, kept, "rows are unchanged")


def _special_scales(target: Target) -> None:
    """int8 rows whose scale is 0, NaN or tiny; and the whole int8 range."""
    _need_rows(target)
    config = target.config(hidden_size=256)
    experts = make_experts(config, seed=53)
    layer = target.layer(config, experts)
    q = torch.arange(-128, 128).to(torch.int8).repeat(8, 1)
    q[5:] = torch.randint(-127, 128, (3, 256), generator=torch.Generator().manual_seed(54), dtype=torch.int8)
    scales = torch.tensor([1.0, 0.0, math.nan, 1e-38, 1e-3, 3e38, 1e-45, 0.02])
    expected = sorted_rows(experts, config, q, scales, [2, 0, 5, 1])
    actual = target.forward_rows(layer, q, torch.tensor([2, 0, 5, 1]), scales)
    target.match(actual, expected)


def _combine(target: Target) -> None:
    """Rows summed by step 8 are what forward returns: the promise that expert parallelism rests on."""
    _need_rows(target)
    target.need_dtype(torch.float32)
    config = target.config()
    experts = make_experts(config, seed=55)
    layer = target.layer(config, experts)
    x, weights, ids = target.inputs(config, 19, seed=56, dtype=torch.float32)
    flat = ids.flatten().to(torch.int64)
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=config.num_experts)
    rows = target.forward_rows(layer, x[order // config.top_k], counts)
    out = torch.zeros_like(x)
    for row, place in zip(rows, order.tolist(), strict=True):
        token, slot = divmod(place, config.top_k)
        out[token] = out[token] + weights[token, slot] * row
    target.match(out, reference_output(config, experts, x, weights, ids), "rows summed")
    target.match(target.forward(layer, x, weights, ids), out, "forward")


def cases(grid: Grid) -> Iterator[Case]:
    """Make the cases."""
    case = functools.partial(Case, "rows")
    for number, activation in enumerate(get_args(Activation)):
        for place, counts in enumerate(_COUNTS):
            if grid == "reduced" and (number + place) % 5:
                continue
            bias = (number + place) % 2 == 1
            name = f"{counts}-{activation}{'-bias' if bias else ''}"
            yield case(name, functools.partial(_sorted_rows, counts=counts, activation=activation, bias=bias))
    yield case("special-scales", _special_scales)
    yield case("combine", _combine)
