"""Figures from samples that are given, so that each can be worked out by hand."""

from __future__ import annotations

import pytest
from measured_kernels import point

from int8moe.benchmark.roofline import Roofline, Work, roofline
from int8moe.benchmark.summary import comparisons, figures, quartiles

WORK = Work(tokens=4, touched_experts=2, weight_bytes=6000, ops=8000)


def test_the_larger_limit_binds() -> None:
    assert roofline(WORK, bandwidth=1000, peak=4000, achieved=1) == Roofline(6.0, 2.0, 6.0, "memory")
    assert roofline(WORK, bandwidth=6000, peak=4000, achieved=1) == Roofline(1.0, 2.0, 2.0, "compute")


def test_without_a_peak_memory_binds_only_where_that_is_known() -> None:
    """At 2000 operations/s, which the kernel has shown, the call would compute for 4 s and read for 6 s."""
    assert roofline(WORK, bandwidth=1000, peak=None, achieved=2000) == Roofline(6.0, None, 6.0, "memory")
    assert roofline(WORK, bandwidth=1000, peak=None, achieved=1000) == Roofline(6.0, None, None, None)


def test_figures_are_those_of_the_medians() -> None:
    samples = point((4.0, 1.0, 2.0), weight_bytes=2_000_000_000, ops=6_000_000_000_000,
                    bandwidths=(1e9, 4e9, 2e9, 4e9), peaks=(9e12, 4e12, 8e12))  # fmt: skip
    ((row,),) = figures([samples])
    assert (row.median_seconds, row.best_seconds, row.quartile_seconds) == (2.0, 1.0, (1.5, 3.0))
    assert (row.gb_per_s, row.tops) == (1.0, 3.0)
    assert (row.read_gb_per_s, row.peak_tops) == (3.0, 8.0)
    assert (row.memory_seconds, row.compute_seconds) == (pytest.approx(2 / 3), 0.75)
    assert (row.roofline_seconds, row.bound) == (0.75, "compute")
    assert row.fraction == 0.375
    assert row.memory_fraction == pytest.approx(1 / 3)


def test_the_rate_of_one_point_tells_what_binds_at_another() -> None:
    """1 s of reading each. M 64 shows 500 operations/s, so M 1 could be computed in 0.2 s: memory binds there."""
    small = point((2.0,), tokens=1, weight_bytes=1000, ops=100, peaks=())
    large = point((16.0, 20.0), tokens=64, weight_bytes=1000, ops=8000, peaks=())
    (at_small,), (at_large,) = figures([small, large])
    assert (at_small.bound, at_small.fraction, at_small.peak_tops) == ("memory", 0.5, None)
    assert (at_large.bound, at_large.fraction, at_large.roofline_seconds) == (None, None, None)
    assert at_large.memory_fraction == pytest.approx(1 / 18)


def test_each_kernel_has_its_own_rate() -> None:
    """The first shows 1000 operations/s and so the memory's limit; the second, 10 times slower, does not."""
    (rows,) = figures([point((1.0,), (10.0,), weight_bytes=1000, ops=1000, peaks=())])
    assert [row.bound for row in rows] == ["memory", None]


def test_quartiles_of_one_value() -> None:
    assert quartiles([3.0]) == (3.0, 3.0)


def test_comparison_of_two_kernels() -> None:
    (row,) = comparisons(point((2.0, 4.0, 2.0), (1.0, 3.0, 1.0)), ["a.x", "b.y"])
    assert (row.side, row.ratio, row.noise_check, row.void) == (1, 0.5, False, None)
    assert row.quartiles == (0.5, 0.625)


@pytest.mark.parametrize(
    ("second", "void"), [(1.0, False), (1.049, False), (1.051, True), (0.96, False), (0.951, True)]
)
def test_a_noise_check_is_void_above_five_percent_either_way(second: float, void: bool) -> None:
    (row,) = comparisons(point((1.0, 1.0), (second, second)), ["a.x", "a.x"])
    assert (row.noise_check, row.void) == (True, void)


@pytest.mark.parametrize(("again", "void"), [(1.0, False), (2.0, True)])
def test_a_noise_check_speaks_for_the_other_comparisons(again: float, void: bool) -> None:
    rows = comparisons(point((1.0,), (again,), (0.5,)), ["a.x", "a.x", "b.y"])
    assert [(row.side, row.noise_check, row.void) for row in rows] == [(1, True, void), (2, False, void)]
    assert rows[1].ratio == 0.5
