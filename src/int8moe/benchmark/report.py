"""The document of a run, from which the table and the plot are made, too. Everything in it is JSON."""

from __future__ import annotations

import dataclasses
import platform
import statistics
from typing import Any

import torch

from ..host import this_host
from ..registry import get_registry
from .machine import this_machine
from .measure import Side
from .overhead import Overhead
from .request import Request
from .run import Benchmark, Results
from .summary import PointSamples, SideFigures, comparisons, figures

SCHEMA = 1
_ENOUGH_CACHES = 4
"""Weights that are rotated over are at least so many times the largest cache, or a note says so."""
_MOSTLY = 0.9
_IMPOSSIBLE = 1.05
"""A fraction above 1 by more than the noise that has to be expected."""
_VOID = 1.3
"""Above this a fraction says nothing: the limits were measured while others had the machine."""


def document(benchmark: Benchmark, results: Results, threads: int) -> dict[str, Any]:
    """Everything that is known about a run; times in seconds, memory in bytes.

    Args:
        benchmark: after its load.
        results: of its measure.
        threads: that it ran with.
    """
    import int8moe

    request, config = benchmark.request, benchmark.config
    names = [kernel.name for kernel in benchmark.kernels]
    machine = {**this_machine()._asdict(), "huge_pages": benchmark.huge_pages}
    kernels = [_kernel(side, index, results.points) for index, side in enumerate(benchmark.sides)]
    points = [
        _point(point, rows, names, kernels, cached=_may_be_cached(machine, kernels))
        for point, rows in zip(results.points, figures(results.points), strict=True)
    ]
    checks = [row["void"] for point in points for row in point["comparisons"] if row["noise_check"]]
    host = this_host()
    return {
        "schema": SCHEMA,
        "shape": {
            "name": request.shape_name,
            **request.shape._asdict(),
            "full_num_experts": request.full_num_experts,
        },
        "dtype": config.hidden_dtype,
        "routing": request.routing,
        "seed": request.seed,
        "rounds": request.rounds,
        "seconds": request.seconds,
        "threads": threads,
        "threads_source": host.num_threads_source if request.threads is None else "--threads",
        "machine": machine,
        "versions": {
            "int8moe": int8moe.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            **{kernel["distribution"]: kernel["version"] for kernel in kernels if kernel["version"]},
        },
        "kernels": kernels,
        "points": points,
        "void": any(checks) if checks else None,
        "overhead": [_overhead(name, found) for name, found in results.overheads.items()],
        "disturbance": _disturbance(results.disturbance),
        "notes": _notes(request, machine, kernels, points),
    }


def _kernel(side: Side, index: int, points: tuple[PointSamples, ...]) -> dict[str, Any]:
    kernel, layers = side.layers.kernel, side.layers
    bandwidths = [value for point in points for value in point.sides[index].bandwidths]
    peaks = [value for point in points for value in point.sides[index].peaks]
    seconds = layers.load_seconds + layers.pack_seconds
    return {
        "label": side.label,
        "kernel": kernel.name,
        "distribution": kernel.distribution,
        "version": get_registry().find(kernel.name).version,
        "layout": kernel.spec.layout,
        "numerics": str(kernel.spec.numerics),
        "layers": len(layers.layers),
        "weight_bytes": layers.nbytes,
        "load_seconds": layers.load_seconds,
        "pack_seconds": layers.pack_seconds,
        "load_pack_gb_per_s": layers.nbytes / seconds / 1e9,
        "reader": side.limits.reader,
        "read_gb_per_s": statistics.median(bandwidths) / 1e9,
        "peak_tops": statistics.median(peaks) / 1e12 if peaks else None,
    }


def _point(
    point: PointSamples, rows: list[SideFigures], names: list[str], kernels: list[dict[str, Any]], *, cached: bool
) -> dict[str, Any]:
    """``cached``: the weights may stay in a cache, so that fractions above 1 are possible."""
    labels = [kernel["label"] for kernel in kernels]
    return {
        **point.work._asdict(),
        "rounds": len(point.sides[0].seconds),
        "kernels": [
            {
                "label": label,
                **row._asdict(),
                "fraction_void": not cached and (row.fraction or row.memory_fraction) > _VOID,
                "samples": samples._asdict(),
            }
            for label, row, samples in zip(labels, rows, point.sides, strict=True)
        ],
        "comparisons": [
            {"label": labels[row.side], "to": labels[0], **{k: v for k, v in row._asdict().items() if k != "side"}}
            for row in comparisons(point, names)
        ],
        "disturbance": _disturbance(point.disturbance),
    }


def _disturbance(found: Any) -> dict[str, Any]:
    return {**dataclasses.asdict(found), "disturbed": found.disturbed}


def _overhead(name: str, found: Overhead | str) -> dict[str, Any]:
    if isinstance(found, str):
        return {"kernel": name, **dict.fromkeys(Overhead._fields), "reason": found}
    return {"kernel": name, **found._asdict(), "reason": ""}


def _may_be_cached(machine: dict[str, Any], kernels: list[dict[str, Any]]) -> bool:
    cache: int | None = machine["cache_bytes"]
    return cache is not None and bool(kernels[0]["weight_bytes"] < _ENOUGH_CACHES * cache)


def _notes(
    request: Request, machine: dict[str, Any], kernels: list[dict[str, Any]], points: list[dict[str, Any]]
) -> list[str]:
    """What a reader of the figures has to know."""
    notes = []
    shape = request.shape
    if shape.num_experts != request.full_num_experts:
        notes.append(f"{shape.num_experts} of the {request.full_num_experts} experts of {request.shape_name}")
    for kernel in {row["kernel"]: row for row in kernels}.values():
        if kernel["peak_tops"] is None:
            notes.append(
                f"peak not measured: {kernel['kernel']} has no run_peak; its fractions are of the memory limit alone, "
                "and of the roofline only where memory is known to bind"
            )
    cache, weights = machine["cache_bytes"], kernels[0]["weight_bytes"]
    if _may_be_cached(machine, kernels):
        notes.append(
            f"the {weights / 1e6:.3g} MB of weights may stay in the cache of {cache / 1e6:.3g} MB, so fractions above "
            "1 are possible; give more --gigabytes"
        )
    elif above := [
        str(point["tokens"])
        for point in points
        if any((side["fraction"] or side["memory_fraction"]) > _IMPOSSIBLE for side in point["kernels"])
    ]:
        notes.append(
            f"fractions above 1 at M = {', '.join(above)}: others disturbed the limits more than the calls "
            f"(above {_VOID} they are void); wait for a quieter machine, or give more --rounds"
        )
    pages = machine["huge_pages"]
    if pages is not None and pages < _MOSTLY:
        notes.append(
            f"{pages:.0%} of the read buffer lies on huge pages, so the roofline is too low; "
            "is /sys/kernel/mm/transparent_hugepage/enabled at madvise or always?"
        )
    return notes
