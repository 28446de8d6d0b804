"""Strides: any view of hidden_states, topk_ids and topk_weights gives the bits of its contiguous copy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..bits import assert_same_bits
from ..case import Case, Grid
from ..makers import make_experts
from ..target import Target, remembered_output


def _column_slice(t: Tensor) -> Tensor:
    wide = torch.zeros(t.shape[0], t.shape[1] + 7, dtype=t.dtype)
    wide[:, 3 : 3 + t.shape[1]] = t
    return wide[:, 3 : 3 + t.shape[1]]


def _transpose(t: Tensor) -> Tensor:
    return t.t().contiguous().t()


def _every_second_row(t: Tensor) -> Tensor:
    tall = torch.zeros(2 * t.shape[0], t.shape[1], dtype=t.dtype)
    tall[::2] = t
    return tall[::2]


def _every_third_column(t: Tensor) -> Tensor:
    wide = torch.zeros(t.shape[0], 3 * t.shape[1], dtype=t.dtype)
    wide[:, ::3] = t
    return wide[:, ::3]


def _offset(t: Tensor) -> Tensor:
    """Contiguous, but one element off every alignment."""
    flat = torch.zeros(t.numel() + 1, dtype=t.dtype)
    flat[1:] = t.reshape(-1)
    return flat[1:].view(t.shape)


def _same_row(t: Tensor) -> Tensor:
    return t[:1].expand_as(t)


def _same_column(t: Tensor) -> Tensor:
    return t[:, :1].expand_as(t)


def _one_value(t: Tensor) -> Tensor:
    return t[:1, :1].expand_as(t)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "column-slice": _column_slice,
    "transpose": _transpose,
    "every-second-row": _every_second_row,
    "every-third-column": _every_third_column,
    "offset": _offset,
    "same-row": _same_row,
    "same-column": _same_column,
    "one-value": _one_value,
}
"""Name -> function that returns a view; all but the last three keep the values."""


def _strided(target: Target, view: str, which: str, tokens: int) -> None:
    config = target.config(num_experts=6, top_k=3, hidden_size=67, intermediate_size=33)
    experts = make_experts(config, seed=21)
    layer = target.layer(config, experts)
    for dtype in target.dtypes:
        for ids_dtype in (torch.int32, torch.int64):
            x, weights, ids = target.inputs(config, tokens, seed=tokens, dtype=dtype, ids_dtype=ids_dtype)
            if which in ("hidden", "all"):
                x = VIEWS[view](x)
            if which in ("weights", "all"):
                weights = VIEWS[view](weights)
            if which in ("ids", "all"):
                ids = VIEWS[view](ids)
            kept = x.clone(), weights.clone(), ids.clone()
            plain = x.contiguous(), weights.contiguous(), ids.contiguous()
            expected = remembered_output(config, experts, plain)
            context = f"{dtype}, ids {ids_dtype}"
            target.check(layer, experts, (x, weights, ids), expected=expected, context=context)
            for before, after in zip(kept, (x, weights, ids), strict=True):
                assert_same_bits(after, before, "inputs are unchanged")


def cases(grid: Grid) -> Iterator[Case]:
    """Make the cases."""
    which = ("hidden", "ids", "weights", "all") if grid != "reduced" else ("hidden", "all")
    for view in VIEWS:
        for name in which:
            for tokens in (5,) if grid == "reduced" else (1, 5, 34):
                yield Case(
                    "strides",
                    f"{view}-{name}-M{tokens}",
                    functools.partial(_strided, view=view, which=name, tokens=tokens),
                )
