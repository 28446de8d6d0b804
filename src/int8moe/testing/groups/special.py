"""Special rows and values: zero, tiny, NaN, Inf, denormal, half-way, overflow, every part of an activation."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import get_args

import torch
from torch import Tensor

from ...contracts import Activation, MoEConfig
from ..bits import assert_same_bits
from ..case import Case, Grid, skip
from ..makers import Experts, make_experts, make_hidden_states, reference_output, threads
from ..settings import flushes
from ..target import Target

_FLT_MAX = torch.finfo(torch.float32).max
_TINY = 127.0 / _FLT_MAX  # amax below this has no finite 127 / amax


def _rows_between(
    target: Target, dtype: torch.dtype, values: Callable[[Tensor, torch.dtype], dict[str, Tensor]]
) -> None:
    """Put special rows between normal ones: each is as the reference has it, the normal ones as without."""
    target.need_dtype(dtype)
    config = target.config(num_experts=5, top_k=2, hidden_size=65, intermediate_size=33)
    experts = make_experts(config, seed=31)
    layer = target.layer(config, experts)
    normal = make_hidden_states(1, 65, dtype=dtype, seed=32)[0]
    special = values(normal.to(torch.float32), dtype)
    rows = [normal]
    for row in special.values():
        rows += [row.to(dtype), normal]
    _, weights, ids = target.inputs(config, len(rows), seed=33)
    ids[::2], weights[::2] = ids[:1], weights[:1]
    expected = target.check(
        layer, experts, (torch.stack(rows), weights, ids), context=f"{dtype}, rows {', '.join(special)}"
    )
    target.match(expected[::2], expected[:1].expand_as(expected[::2]), "normal rows are not touched by the others")
    alone = target.forward(layer, torch.stack(rows[:1]), weights[:1], ids[:1])
    target.match(alone, expected[:1], "the normal row alone")


def _zero_rows(normal: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    zero = torch.zeros_like(normal)
    single = zero.clone()
    single[-1] = 1.0
    return {"0": zero, "-0": -zero, "one entry": single}


def _tiny_rows(normal: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    unit = normal / normal.abs().max()
    below = math.nextafter(_TINY, 0.0) * (1 - 1e-6)
    rows = {f"amax {a:g}": unit * a for a in (_TINY * 0.5, below, _TINY, _TINY * 1.01, _TINY * 2)}
    smallest = torch.finfo(dtype).smallest_normal
    rows["smallest normal"] = torch.full_like(normal, smallest)
    return rows


def _denormal_rows(normal: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    info = torch.finfo(dtype)
    step = info.smallest_normal * info.eps
    unit = normal / normal.abs().max()
    mixed = normal.clone()
    mixed[::2] = step
    return {
        "smallest denormal": torch.full_like(normal, step),
        "denormals": unit * info.smallest_normal,
        "denormals among normals": mixed,
        "1e-39": torch.full_like(normal, 1e-39),
    }


def _infinite_rows(normal: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    rows = {}
    for name, value in (("NaN", math.nan), ("Inf", math.inf), ("-Inf", -math.inf)):
        for place in (0, 31, 64):
            row = normal.clone()
            row[place] = value
            rows[f"{name} at {place}"] = row
        rows[f"all {name}"] = torch.full_like(normal, value)
    both = normal.clone()
    both[3], both[40] = math.inf, math.nan
    rows["Inf and NaN"] = both
    return rows


def _largest_rows(normal: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    largest = torch.finfo(dtype).max
    signs = torch.where(normal < 0, -1.0, 1.0)
    mixed = normal.clone()
    mixed[7] = -largest
    return {"largest": signs * largest, "largest among normals": mixed, "half": signs * (largest / 2)}


def _half_way_rows(normal: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Entries n + 0.5 at amax 127; at amax 254 odd numbers are half-way."""
    halves = torch.arange(65, dtype=torch.float32) - 32.5
    halves[0] = 127.0
    negative = -halves
    large = torch.arange(65, dtype=torch.float32) * 2 - 63.0
    large[1] = 254.0
    upper = torch.arange(65, dtype=torch.float32) + 62.5
    upper[2] = 127.0
    return {"halves": halves, "negative": negative, "amax 254": large, "upper": upper}


_ROWS = {
    "zero": _zero_rows,
    "tiny": _tiny_rows,
    "denormal": _denormal_rows,
    "infinite": _infinite_rows,
    "largest": _largest_rows,
    "half-way": _half_way_rows,
}


def _nan_row_left_out(target: Target) -> None:
    """A NaN row without a slot gives exact zeros; so does an Inf row."""
    config = target.config()
    experts = make_experts(config, seed=34)
    layer = target.layer(config, experts)
    x, weights, ids = target.inputs(config, 3, seed=35)
    x[0, 0], x[2, 5] = math.nan, math.inf
    ids[0], ids[2] = -1, config.num_experts
    expected = target.check(layer, experts, (x, weights, ids))
    assert_same_bits(expected[::2], torch.zeros_like(expected[::2]), "rows without a slot")


def _zero_scales(target: Target) -> None:
    """Weight rows of zeros with scale 0, whole experts with scale 0."""
    config = target.config(hidden_size=64)
    experts = make_experts(config, seed=36)
    experts.w13_weight[:, ::3] = 0
    experts.w13_weight_scale[:, ::3] = 0.0
    experts.w2_weight_scale[:, 5] = 0.0
    experts.w13_weight_scale[1] = 0.0
    experts.w2_weight_scale[2] = 0.0
    layer = target.layer(config, experts)
    for dtype in target.dtypes:
        x, weights, ids = target.inputs(config, 12, seed=37, dtype=dtype)
        x[3] = 0.0
        expected = target.check(layer, experts, (x, weights, ids), context=str(dtype))
        assert not bool(torch.isnan(expected).any()), "zero scales never make NaN"


def _odd_scales(target: Target, w13: float, w2: float) -> None:
    """Scales that make sums overflow to Inf, or results denormal; Inf in the middle makes its token NaN."""
    config = target.config(hidden_size=33, intermediate_size=17, num_experts=3)
    base = make_experts(config, seed=38)
    w13_scale, w2_scale = base.w13_weight_scale.clone(), base.w2_weight_scale.clone()
    w13_scale[1:], w2_scale[1:] = w13, w2
    experts = Experts(base.w13_weight, w13_scale, base.w2_weight, w2_scale)
    layer = target.layer(config, experts)
    for dtype in target.dtypes:
        target.check(layer, experts, target.inputs(config, 9, seed=39, dtype=dtype), context=str(dtype))


def _sweep_values() -> Tensor:
    """Arguments of an activation: a grid over every branch, the edges of exp, huge, tiny, denormal, Inf."""
    dense = torch.linspace(-30, 30, 301).tolist()
    edges = [87.3, 88.0, 88.5, 88.72, 88.7228, 88.73, 89.0, 89.1, 96.0, 103.0, 103.9, 104.0, 104.1, 120.0]
    edges += [1e-3, 1e-5, 1e-10, 1e-20, 1e-30, 1.5e-38, 1e-39, 1e-45, 7.0, 6.9999995, 7.0000005, 0.5, 1e3, 1e6]
    edges += [1e19, 1.8e19, 1e20, 1e30, 3e38]
    return torch.tensor(dense + edges + [-v for v in edges], dtype=torch.float32)


def _activation_sweep(target: Target, activation: Activation, up: float) -> None:
    """Experts of one hidden unit each, so that the output carries the activation's bits themselves."""
    values = _sweep_values()
    count = len(values)
    config = MoEConfig(num_experts=count + 2, top_k=1, hidden_size=1, intermediate_size=1, activation=activation)
    gate = values.abs()
    # d = w * scale for x = 1 up to two roundings; the last two experts overflow to +-Inf.
    gate = torch.cat([gate, torch.full((2,), _FLT_MAX)]).reshape(-1, 1)
    signs = torch.cat([torch.where(torch.signbit(values), -1, 1), torch.tensor([2, -2])]).to(torch.int8)
    w13, scale = signs.reshape(-1, 1, 1), gate
    if config.is_gated:
        up_sign = -1 if up < 0 else 1
        w13 = torch.cat([w13, torch.full_like(w13, up_sign)], dim=1)
        scale = torch.cat([scale, torch.full_like(scale, abs(up))], dim=1)
    ones = torch.ones(count + 2, 1)
    experts = Experts(w13, scale, torch.ones(count + 2, 1, 1, dtype=torch.int8), ones)
    layer = target.layer(config, experts)
    ids = torch.arange(count + 2).reshape(-1, 1)
    widest = max(target.dtypes, key=lambda dtype: torch.finfo(dtype).bits)
    target.check(layer, experts, (ones.to(widest), ones, ids), context=str(widest))


def _output_rounding(target: Target, dtype: torch.dtype) -> None:
    """Half-way results round to even in the output dtype, denormal results stay, overflow is Inf."""
    target.need_dtype(dtype)
    info = torch.finfo(dtype)
    step = info.eps / 2  # half a unit in the last place of 1
    targets = [1 + step, 1 + 3 * step, 1 + step + 2.0**-20, 1 - step / 2, 3 + 2 * step, 255 * (1 + step)]
    targets += [info.smallest_normal * f for f in (1.0, 0.5, 0.75, 1.5, info.eps, 1.5 * info.eps, 0.5 * info.eps)]
    targets += [info.max, min(info.max * (1 + step / 2), _FLT_MAX), min(info.max * 2.0, _FLT_MAX)]
    values = torch.tensor(targets, dtype=torch.float64).to(torch.float32)
    count = len(values)
    activation = "relu2_no_mul" if "relu2_no_mul" in target.activations else target.activations[0]
    config = target.config(num_experts=count, top_k=1, hidden_size=2, intermediate_size=1, activation=activation)
    weights = torch.ones(count, config.w13_rows, 2, dtype=torch.int8)
    w2 = torch.tensor([1, -1], dtype=torch.int8).reshape(1, 2, 1).repeat(count, 1, 1)
    experts = Experts(weights, torch.ones(count, config.w13_rows), w2, torch.ones(count, 2))
    # What y is without a router weight says which weight makes the wanted result.
    ids = torch.arange(count).reshape(-1, 1)
    x = torch.ones(count, 2, dtype=torch.float32)
    unweighted = reference_output(config, experts, x, torch.ones(count, 1), ids)[:, :1]
    router = values.reshape(-1, 1) / unweighted
    layer = target.layer(config, experts)
    target.check(layer, experts, (x.to(dtype), router, ids), context=str(dtype))


def _flushing_caller(target: Target, tokens: int) -> None:
    """torch.set_flush_denormal(True) in the caller changes no bit, and is still on afterwards."""
    config = target.config(num_experts=3, top_k=2, hidden_size=65, intermediate_size=33)
    base = make_experts(config, seed=41)
    w2_scale = base.w2_weight_scale.clone()
    w2_scale[1:] = 1e-39
    experts = Experts(base.w13_weight, base.w13_weight_scale, base.w2_weight, w2_scale)
    layer = target.layer(config, experts)
    work = []
    for dtype in target.dtypes:
        x, weights, ids = target.inputs(config, tokens, seed=42, dtype=dtype)
        x[0] = torch.finfo(dtype).smallest_normal / 2
        ids[-1] = torch.tensor([1, 2])
        work.append((x, weights, ids, reference_output(config, experts, x, weights, ids)))
    if not torch.set_flush_denormal(True):
        skip("this machine cannot flush denormals")
    try:
        for x, weights, ids, expected in work:
            for count in target.threads:
                with threads(count):
                    actual = target.forward(layer, x, weights, ids)
                assert flushes(), "the caller's floating-point mode was not put back"
                target.match(actual, expected, f"{x.dtype}, flushing, threads {count}")
        packed_while_flushing = target.layer(config, experts)
        x, weights, ids, expected = work[0]
        target.match(target.forward(packed_while_flushing, x, weights, ids), expected, "packed while flushing")
    finally:
        torch.set_flush_denormal(False)
    x, weights, ids, expected = work[0]
    target.match(target.forward(layer, x, weights, ids), expected, "after flushing")
    assert not flushes(), "the call left flush-to-zero on"


def cases(grid: Grid) -> Iterator[Case]:
    """Make the cases."""
    case = functools.partial(Case, "special")
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        word = str(dtype).removeprefix("torch.")
        for name, values in _ROWS.items():
            yield case(f"{name}-rows-{word}", functools.partial(_rows_between, dtype=dtype, values=values))
        yield case(f"output-rounding-{word}", functools.partial(_output_rounding, dtype=dtype))
    yield case("nan-row-left-out", _nan_row_left_out)
    yield case("zero-scales", _zero_scales)
    for w13, w2 in ((3e38, 1.0), (1e33, 1e-30), (1.0, 3e38), (1.0, 1e-40), (1e-45, 1.0), (1e-38, 1e38)):
        yield case(f"scales-{w13:g}-{w2:g}", functools.partial(_odd_scales, w13=w13, w2=w2))
    for activation in get_args(Activation):
        ups = (1.0,) if activation.endswith("_no_mul") or grid == "reduced" else (1.0, -0.3, 0.0)
        for up in ups:
            yield case(
                f"sweep-{activation}-up{up:g}", functools.partial(_activation_sweep, activation=activation, up=up)
            )
    for tokens in (1, 5, 40):
        yield case(f"flushing-caller-M{tokens}", functools.partial(_flushing_caller, tokens=tokens))
