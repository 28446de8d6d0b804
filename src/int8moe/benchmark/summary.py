"""From samples to figures: medians, fractions of the roofline, ratios. Pure arithmetic; imports no torch."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Literal, NamedTuple

from .disturbance import Disturbance
from .roofline import Work, roofline

VOID_LIMIT = 0.05
"""A kernel that differs by more than this from itself says that the machine was too noisy to compare others."""


class SideSamples(NamedTuple):
    """What was measured for one kernel at one point, one value a round (the limits have one more, at the end).

    Attributes:
        seconds: of the calls.
        bandwidths: bytes/s read.
        peaks: operations/s; () for a kernel without ``run_peak``.
    """

    seconds: tuple[float, ...]
    bandwidths: tuple[float, ...]
    peaks: tuple[float, ...]


class PointSamples(NamedTuple):
    """One M: what a call does, the samples of each kernel, and how quiet the machine was."""

    work: Work
    sides: tuple[SideSamples, ...]
    disturbance: Disturbance


class SideFigures(NamedTuple):
    """What one kernel reached at one point.

    Attributes:
        median_seconds: of the calls.
        best_seconds: the fastest call.
        quartile_seconds: a quarter of the calls was faster than the first, a quarter slower than the second.
        gb_per_s: 10**9 bytes of weights a second, at the median.
        tops: 10**12 operations a second, at the median.
        read_gb_per_s: what could be read, median of the rounds.
        peak_tops: what could be computed, median of the rounds; None where it was not measured.
        memory_seconds: least time to read the weights.
        compute_seconds: least time to compute; None where the peak was not measured.
        roofline_seconds: the larger of the two; None where that cannot be known.
        bound: "memory", "compute", or None where that cannot be known.
        fraction: roofline_seconds / median_seconds; None with it.
        memory_fraction: memory_seconds / median_seconds, which ``fraction`` is never below.
    """

    median_seconds: float
    best_seconds: float
    quartile_seconds: tuple[float, float]
    gb_per_s: float
    tops: float
    read_gb_per_s: float
    peak_tops: float | None
    memory_seconds: float
    compute_seconds: float | None
    roofline_seconds: float | None
    bound: Literal["memory", "compute"] | None
    fraction: float | None
    memory_fraction: float


class Comparison(NamedTuple):
    """One kernel against the first at one point.

    Attributes:
        side: which of the kernels.
        ratio: its median time through that of the first; below 1 is faster.
        quartiles: of the rounds' own ratios.
        noise_check: both are the same kernel.
        void: of a noise check: the two differ by more than :data:`VOID_LIMIT`. Of other comparisons: a noise check at
            this point is void. None where there was none.
    """

    side: int
    ratio: float
    quartiles: tuple[float, float]
    noise_check: bool
    void: bool | None


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """First and third quartile, interpolated."""
    if len(values) == 1:
        return values[0], values[0]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third


def figures(points: Sequence[PointSamples]) -> list[list[SideFigures]]:
    """What each kernel reached, a list of kernels for each point."""
    count = len(points[0].sides) if points else 0
    achieved = [max(point.work.ops / min(point.sides[side].seconds) for point in points) for side in range(count)]
    return [
        [_figures(point.work, samples, achieved[side]) for side, samples in enumerate(point.sides)] for point in points
    ]


def _figures(work: Work, samples: SideSamples, achieved: float) -> SideFigures:
    median = statistics.median(samples.seconds)
    bandwidth = statistics.median(samples.bandwidths)
    peak = statistics.median(samples.peaks) if samples.peaks else None
    limits = roofline(work, bandwidth=bandwidth, peak=peak, achieved=achieved)
    return SideFigures(
        median_seconds=median,
        best_seconds=min(samples.seconds),
        quartile_seconds=quartiles(samples.seconds),
        gb_per_s=work.weight_bytes / median / 1e9,
        tops=work.ops / median / 1e12,
        read_gb_per_s=bandwidth / 1e9,
        peak_tops=None if peak is None else peak / 1e12,
        memory_seconds=limits.memory_seconds,
        compute_seconds=limits.compute_seconds,
        roofline_seconds=limits.seconds,
        bound=limits.bound,
        fraction=None if limits.seconds is None else limits.seconds / median,
        memory_fraction=limits.memory_seconds / median,
    )


def comparisons(point: PointSamples, kernels: Sequence[str]) -> list[Comparison]:
    """Every kernel but the first against the first.

    Args:
        point: the samples.
        kernels: name of each side; a name that is the first's again is the noise check.
    """
    first = point.sides[0].seconds
    rows = []
    for side in range(1, len(kernels)):
        other = point.sides[side].seconds
        ratio = statistics.median(other) / statistics.median(first)
        same = kernels[side] == kernels[0]
        rounds = [b / a for a, b in zip(first, other, strict=True)]
        rows.append(Comparison(side, ratio, quartiles(rounds), same, _differs(ratio) if same else None))
    checks = [row.void for row in rows if row.noise_check]
    void = any(checks) if checks else None
    return [row if row.noise_check else row._replace(void=void) for row in rows]


def _differs(ratio: float) -> bool:
    """Whichever of the two is the slower one."""
    return max(ratio, 1 / ratio) > 1 + VOID_LIMIT
