"""Integer exactness: both products are exact for weights over the whole of [-128, 127]."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from ...contracts import MAX_REDUCTION, MoEConfig
from ..case import Case, Grid
from ..makers import Experts
from ..target import Target

_TOKENS = (1, 2, 16, 17)


def _one_expert(target: Target, hidden: int, inner: int) -> MoEConfig:
    return target.config(num_experts=1, top_k=1, hidden_size=hidden, intermediate_size=inner)


def _everyone(tokens: int) -> tuple[Tensor, Tensor]:
    return torch.ones(tokens, 1), torch.zeros(tokens, 1, dtype=torch.int32)


def _extreme(target: Target, tokens: int, hidden: int) -> None:
    """Gate rows +1, up and w2 all -128: a 16-bit saturating pair-add fails."""
    config = _one_expert(target, hidden, hidden)
    rows = torch.full((1, config.w13_rows, hidden), -128, dtype=torch.int8)
    scale = torch.full((1, config.w13_rows), 1 / 128)
    if config.is_gated:
        rows[:, :hidden], scale[:, :hidden] = 1, 1.0
    experts = Experts(
        rows, scale, torch.full((1, hidden, hidden), -128, dtype=torch.int8), torch.full((1, hidden), 1 / 128)
    )
    layer = target.layer(config, experts)
    for dtype in target.dtypes:
        inputs = torch.ones(tokens, hidden, dtype=dtype), *_everyone(tokens)
        expected = target.check(layer, experts, inputs, context=str(dtype))
        output = target.forward(layer, *inputs)
        target.match(output, output[:1].expand_as(output), f"{dtype}, all rows equal")
        if config.activation == "silu" and hidden == 64 and dtype == torch.float32:
            # h = silu(64) * -64 = -4096 throughout, q = -127, so y = 64 * 4096.
            error = (expected - 64 * 4096.0).abs().max()
            assert float(error) <= 1.0, f"the reference gives {expected[0, 0].item()}, the closed form 262144"


def _cancel(target: Target, hidden: int, tokens: int) -> None:
    """Partial sums above 2**24 that cancel to a small exact sum, in both products."""
    generator = torch.Generator().manual_seed(hidden)

    def cancelling(rows: int, depth: int) -> Tensor:
        weight = torch.full((1, rows, depth), 127, dtype=torch.int8)
        weight[:, :, depth // 2 :] = -127
        weight[:, :, -1] = torch.randint(-128, 128, (1, rows), generator=generator, dtype=torch.int8)
        weight[:, :, 0] = torch.randint(-128, 128, (1, rows), generator=generator, dtype=torch.int8)
        return weight

    config = _one_expert(target, hidden, 33)
    experts = Experts(
        cancelling(config.w13_rows, hidden),
        torch.full((1, config.w13_rows), 2.0**-6),
        cancelling(hidden, 33),
        torch.full((1, hidden), 2.0**-6),
    )
    layer = target.layer(config, experts)
    for dtype in target.dtypes:
        target.check(layer, experts, (torch.ones(tokens, hidden, dtype=dtype), *_everyone(tokens)))


def _random_extremes(target: Target, hidden: int, inner: int, tokens: int, seed: int) -> None:
    """Weights of {-128, -127, 0, 127} against activations that quantise to +-127."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.tensor([-128, -128, -127, 0, 127, 127], dtype=torch.int8)

    def extremes(*shape: int) -> Tensor:
        return values[torch.randint(0, len(values), shape, generator=generator)]

    config = target.config(num_experts=2, top_k=2, hidden_size=hidden, intermediate_size=inner)
    experts = Experts(
        extremes(2, config.w13_rows, hidden),
        torch.rand(2, config.w13_rows, generator=generator) / 64,
        extremes(2, hidden, inner),
        torch.rand(2, hidden, generator=generator) / 64,
    )
    layer = target.layer(config, experts)
    for dtype in target.dtypes:
        x = (torch.randint(0, 2, (tokens, hidden), generator=generator) * 2 - 1).to(dtype)
        weights = torch.rand(tokens, 2, generator=generator)
        ids = torch.tensor([[0, 1], [1, 1]]).repeat(tokens, 1)[:tokens]
        target.check(layer, experts, (x, weights, ids), context=str(dtype))


def _longest(target: Target, weight: int, sign: int, side: str) -> None:
    """The largest sums that the contract allows: K = 65,793 products of one sign."""
    hidden, inner = (MAX_REDUCTION, 1) if side == "w13" else (1, MAX_REDUCTION)
    config = _one_expert(target, hidden, inner)
    experts = Experts(
        torch.full((1, config.w13_rows, hidden), weight, dtype=torch.int8),
        torch.full((1, config.w13_rows), 2.0**-17),
        torch.full((1, hidden, inner), weight, dtype=torch.int8),
        torch.full((1, hidden), 2.0**-17),
    )
    if side == "w2":  # the activation has to be large and positive, whatever the sign of w2
        experts.w13_weight.fill_(1)
        experts.w13_weight_scale.fill_(1.0)
    layer = target.layer(config, experts)
    x = torch.full((2, hidden), float(sign), dtype=target.dtype())
    target.check(layer, experts, (x, *_everyone(2)))


def _every_weight(target: Target, tokens: int) -> None:
    """Each of the 256 weight values alone in a row of w13 and of w2, at every position of a short row."""
    depth = 5
    config = _one_expert(target, depth, 256 * depth)
    inner = config.intermediate_size
    w13 = torch.zeros(1, config.w13_rows, depth, dtype=torch.int8)
    values = torch.arange(-128, 128, dtype=torch.int32).to(torch.int8)
    for position in range(depth):
        first = 256 * position
        w13[0, first : first + 256, position] = values
        if config.is_gated:
            w13[0, inner + first : inner + first + 256, position] = values.flip(0)
    w2 = values.repeat(depth * depth).reshape(1, depth, inner)
    experts = Experts(w13, torch.full((1, config.w13_rows), 2.0**-5), w2, torch.full((1, depth), 2.0**-9))
    layer = target.layer(config, experts)
    x = torch.linspace(-3, 4, tokens * depth).reshape(tokens, depth)
    for dtype in target.dtypes:
        target.check(layer, experts, (x.to(dtype), *_everyone(tokens)), context=str(dtype))


def cases(grid: Grid) -> Iterator[Case]:
    """Make the cases."""
    case = functools.partial(Case, "integers")
    for hidden in (64, 128) if grid == "reduced" else (64, 63, 128, 17, 256):
        for tokens in _TOKENS:
            yield case(f"minus128-H{hidden}-M{tokens}", functools.partial(_extreme, tokens=tokens, hidden=hidden))
    for hidden in (2049,) if grid == "reduced" else (1024, 2049, 4097):
        for tokens in (1, 17):
            yield case(f"cancel-H{hidden}-M{tokens}", functools.partial(_cancel, hidden=hidden, tokens=tokens))
    shapes = [(64, 64), (65, 33), (256, 128), (1, 300), (300, 1)]
    if grid != "reduced":
        shapes += [(31, 255), (1025, 2), (3, 1025), (2048, 65), (100, 176)]
    for seed, (hidden, inner) in enumerate(shapes):
        for tokens in (1, 3, 18):
            yield case(
                f"extremes-H{hidden}-I{inner}-M{tokens}",
                functools.partial(_random_extremes, hidden=hidden, inner=inner, tokens=tokens, seed=seed),
            )
    for side in ("w13", "w2"):
        for weight in (-128, 127):
            for sign in (-1, 1):
                yield case(
                    f"longest-{side}-w{weight}-x{sign}",
                    functools.partial(_longest, weight=weight, sign=sign, side=side),
                )
    for tokens in (1, 4, 19):
        yield case(f"every-weight-M{tokens}", functools.partial(_every_weight, tokens=tokens))
