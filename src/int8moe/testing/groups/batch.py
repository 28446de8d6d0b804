"""Invariance: a row's bits depend on the row alone, not on its batch, its place in it, or the threads."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from ..case import Case, Grid
from ..makers import make_experts, threads
from ..target import Target

_SHAPES: dict[str, dict[str, Any]] = {
    "small": {"num_experts": 4, "top_k": 2, "hidden_size": 64, "intermediate_size": 48},
    "odd": {"num_experts": 5, "top_k": 3, "hidden_size": 127, "intermediate_size": 33},
    "one": {"num_experts": 1, "top_k": 1, "hidden_size": 129, "intermediate_size": 65},
    "many": {"num_experts": 32, "top_k": 4, "hidden_size": 64, "intermediate_size": 64},
}


def _alone(target: Target, shape: str, tokens: int) -> None:
    """Row i alone is row i of the batch."""
    config = target.config(**_SHAPES[shape])
    experts = make_experts(config, seed=11)
    layer = target.layer(config, experts)
    for dtype in target.dtypes:
        x, weights, ids = target.inputs(config, tokens, seed=tokens, dtype=dtype)
        expected = target.check(layer, experts, (x, weights, ids), context=str(dtype))
        step = max(1, tokens // 24)
        for row in range(0, tokens, step):
            one = slice(row, row + 1)
            target.match(
                target.forward(layer, x[one], weights[one], ids[one]), expected[one], f"{dtype}, row {row} alone"
            )


def _rearranged(target: Target, shape: str, tokens: int) -> None:
    """A permuted batch gives permuted rows; two halves give the halves; a doubled batch gives both twice."""
    config = target.config(**_SHAPES[shape])
    experts = make_experts(config, seed=12)
    layer = target.layer(config, experts)
    inputs = target.inputs(config, tokens, seed=tokens)
    expected = target.check(layer, experts, inputs)
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(tokens))
    half = tokens // 2
    parts = {
        "permuted": order,
        "reversed": torch.arange(tokens - 1, -1, -1),
        "first half": torch.arange(half),
        "second half": torch.arange(half, tokens),
        "twice": torch.arange(tokens).repeat(2),
        "one row repeated": torch.full((tokens,), tokens - 1),
    }
    for name, rows in parts.items():
        for count in target.threads:
            with threads(count):
                actual = target.forward(layer, *(t[rows] for t in inputs))
            target.match(actual, expected[rows], f"{name}, threads {count}")


def _growing(target: Target, shape: str) -> None:
    """Batches of 1, 2, ... 40 rows: every switch between code paths for few and many rows is crossed."""
    config = target.config(**_SHAPES[shape])
    experts = make_experts(config, seed=13)
    layer = target.layer(config, experts)
    inputs = target.inputs(config, 40, seed=14)
    expected = target.check(layer, experts, inputs)
    for tokens in range(1, 41):
        target.match(target.forward(layer, *(t[:tokens] for t in inputs)), expected[:tokens], f"{tokens} rows")


def _many_rows(target: Target, shape: str, tokens: int) -> None:
    config = target.config(**_SHAPES[shape])
    experts = make_experts(config, seed=15)
    layer = target.layer(config, experts)
    inputs = target.inputs(config, tokens, seed=16)
    expected = target.check(layer, experts, inputs)
    for start in range(0, tokens, max(1, tokens // 7)):
        part = slice(start, start + 13)
        target.match(target.forward(layer, *(t[part] for t in inputs)), expected[part], f"rows {start} to {start + 12}")


def _again(target: Target) -> None:
    """The same call twice, other calls between, gives the same bits: nothing is left over in scratch."""
    config = target.config()
    experts = make_experts(config, seed=17)
    layer = target.layer(config, experts)
    inputs = target.inputs(config, 9, seed=18)
    expected = target.check(layer, experts, inputs)
    for tokens in (1, 65, 9, 300, 2):
        target.forward(layer, *target.inputs(config, tokens, seed=tokens))
        target.match(target.forward(layer, *inputs), expected, f"after {tokens} rows")


def _two_layers(target: Target) -> None:
    """Layers of different shapes called in turn do not disturb each other."""
    work = []
    for seed, shape in enumerate(_SHAPES):
        config = target.config(**_SHAPES[shape])
        experts = make_experts(config, seed=seed)
        layer = target.layer(config, experts)
        inputs = target.inputs(config, 20, seed=seed)
        work.append((layer, inputs, target.check(layer, experts, inputs, context=shape)))
    for layer, inputs, expected in (*work, *reversed(work)):
        target.match(target.forward(layer, *inputs), expected)


def cases(grid: Grid) -> Iterator[Case]:
    """Make the cases."""
    case = functools.partial(Case, "batch")
    shapes = ("small", "odd") if grid == "reduced" else tuple(_SHAPES)
    for shape in shapes:
        yield case(f"growing-{shape}", functools.partial(_growing, shape=shape))
        for tokens in (2, 17, 100):
            yield case(f"alone-{shape}-M{tokens}", functools.partial(_alone, shape=shape, tokens=tokens))
            yield case(f"rearranged-{shape}-M{tokens}", functools.partial(_rearranged, shape=shape, tokens=tokens))
        if grid != "reduced":
            yield case(f"rows-{shape}-M700", functools.partial(_many_rows, shape=shape, tokens=700))
        if grid == "all":
            yield case(f"rows-{shape}-M5000", functools.partial(_many_rows, shape=shape, tokens=5000))
    yield case("again", _again)
    yield case("layers-in-turn", _two_layers)
