"""What a call costs beside its work: a layer so small that hardly any is left."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..binding import BoundKernel
from ..contracts import MoEConfig
from ..layer import FusedMoE
from ..testing.makers import make_layer

TINY = {"num_experts": 4, "top_k": 2, "hidden_size": 64, "intermediate_size": 64}
_CALLS = 50
_FEWEST_BATCHES, _MOST_BATCHES = 7, 40
_SECONDS = 1.0
"""After which no more than the fewest batches are made."""


class Overhead(NamedTuple):
    """Of one token through a layer of E 4, H 64, I 64, with autograd on as it is by default.

    Attributes:
        call_seconds: of ``layer(...)`` from Python, median.
        best_call_seconds: the fastest batch.
        hook_seconds: of the kernel's ``apply`` alone, median; the rest is the layer's own.
    """

    call_seconds: float
    best_call_seconds: float
    hook_seconds: float


def measure_overhead(kernel: BoundKernel, config: MoEConfig) -> Overhead:
    """Time calls and hooks in turn, in batches.

    Args:
        kernel: whose hook is called.
        config: activation, bias and dtype are taken from it.

    Raises:
        NoKernelError: the kernel refuses so small a layer.
    """
    tiny = config.model_copy(update=TINY)
    layer: FusedMoE = make_layer(tiny, kernel=kernel.name)
    dtype: torch.dtype = getattr(torch, tiny.hidden_dtype or "bfloat16")
    hidden_states = torch.randn(1, tiny.hidden_size).to(dtype)
    topk_weights, topk_ids = torch.full((1, 2), 0.5), torch.tensor([[0, 1]], dtype=torch.int32)
    out = torch.empty_like(hidden_states)
    with torch.enable_grad():
        calls: list[float] = []
        hooks: list[float] = []
        began = time.perf_counter()
        while len(calls) < _MOST_BATCHES and (len(calls) < _FEWEST_BATCHES or time.perf_counter() - began < _SECONDS):
            calls.append(_per_call(layer, hidden_states, topk_weights, topk_ids))
            hooks.append(_per_call(kernel.apply, layer, hidden_states, topk_weights, topk_ids, out))
    return Overhead(statistics.median(calls), min(calls), statistics.median(hooks))


def _per_call(function: Callable[..., Any], *arguments: Any) -> float:
    began = time.perf_counter()
    for _ in range(_CALLS):
        function(*arguments)
    return (time.perf_counter() - began) / _CALLS
