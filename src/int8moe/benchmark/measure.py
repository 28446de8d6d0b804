"""Alternates reads, peak bursts and calls of every kernel, so that a noisy neighbour hits all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .disturbance import between, snapshot
from .inputs import PointInputs
from .layers import LayerSet
from .limits import Limits
from .summary import PointSamples, SideSamples

_MOST_ROUNDS = 1000


@dataclass(frozen=True)
class Side:
    """One of the kernels that are compared.

    Attributes:
        label: of the kernel, different for each side.
        layers: that it calls in turn.
        limits: of the kernel; shared where the same kernel is compared with itself, as the layers are.
        offset: of the turn, so that two sides that share layers never call the same one in the same round.
    """

    label: str
    layers: LayerSet
    limits: Limits
    offset: int = 0


def warm_up(sides: Sequence[Side], inputs: PointInputs) -> None:
    """Call every layer once, which prepares it."""
    with torch.inference_mode():
        for side in sides:
            for layer in side.layers.layers:
                layer(inputs.hidden_states, inputs.topk_weights, inputs.next_ids())


def measure_point(
    sides: Sequence[Side],
    inputs: PointInputs,
    *,
    rounds: int,
    seconds: float,
    tick: Callable[[float], None] = lambda done: None,
) -> PointSamples:
    """Time calls of every side at one M.

    A round measures the limits of each kernel once and then calls each side once, in an order that turns round from
    round to round. The limits are measured once more after the last round, so that every call lies between two of them.

    Args:
        sides: the kernels.
        inputs: of the calls.
        rounds: at least so many.
        seconds: and for at least that long, but never more than 1000 rounds.
        tick: called after each round with the share of the point that is done, 0 to 1.
    """
    out = torch.empty_like(inputs.hidden_states)
    calls: list[list[float]] = [[] for _ in sides]
    limits = list({id(side.limits): side.limits for side in sides}.values())
    bandwidths: dict[int, list[float]] = {id(limit): [] for limit in limits}
    peaks: dict[int, list[float]] = {id(limit): [] for limit in limits}

    def measure_limits() -> None:
        for limit in limits:
            bandwidths[id(limit)].append(limit.bandwidth(inputs.work.weight_bytes))
        for limit in limits:
            peak = limit.peak(inputs.work.ops)
            if peak is not None:
                peaks[id(limit)].append(peak)

    def one_round(number: int) -> None:
        measure_limits()
        order = range(len(sides)) if number % 2 == 0 else reversed(range(len(sides)))
        for index in order:
            side = sides[index]
            layers = side.layers.layers
            layer = layers[(number + side.offset) % len(layers)]
            ids = inputs.next_ids()
            began = time.perf_counter()
            layer(inputs.hidden_states, inputs.topk_weights, ids, out=out)
            calls[index].append(time.perf_counter() - began)

    with torch.inference_mode():
        one_round(0)  # scratch grows, threads wake: not counted
        for samples in (*calls, *bandwidths.values(), *peaks.values()):
            samples.clear()
        before = snapshot()
        began = time.perf_counter()
        number = 0
        while number < rounds or (time.perf_counter() - began < seconds and number < _MOST_ROUNDS):
            number += 1
            one_round(number)
            spent = (time.perf_counter() - began) / seconds if seconds > 0 else 1.0
            tick(min(number / rounds, spent, 1.0))
        measure_limits()
        disturbance = between(before, snapshot())
    return PointSamples(
        work=inputs.work,
        sides=tuple(
            SideSamples(tuple(calls[index]), tuple(bandwidths[id(side.limits)]), tuple(peaks[id(side.limits)]))
            for index, side in enumerate(sides)
        ),
        disturbance=disturbance,
    )
