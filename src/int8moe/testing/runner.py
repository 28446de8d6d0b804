"""Runs the cases of one kernel in this process: the engine of ``int8moe verify``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TypedDict

from .bits import comparisons
from .case import CaseSkipped, Grid
from .groups import GROUPS
from .target import THREADS, Target

__all__ = ["GroupResult", "Result", "format_group", "format_result", "header", "passed", "run_kernel"]


class Failure(TypedDict):
    """One failed case."""

    case: str
    message: str


class Skip(TypedDict):
    """One case that the kernel's declaration leaves out."""

    case: str
    reason: str


class GroupResult(TypedDict):
    """What became of one group."""

    name: str
    passed: int
    failed: int
    skipped: int
    seconds: float
    failures: list[Failure]
    skips: list[Skip]


class Result(TypedDict):
    """The document of ``--json``."""

    kernel: str
    numerics: str
    comparisons: int
    groups: list[GroupResult]


def run_kernel(
    name: str,
    *,
    grid: Grid = "default",
    groups: Iterable[str] | None = None,
    threads: Iterable[int] = THREADS,
    progress: Callable[[GroupResult], None] | None = None,
) -> Result:
    """Run the suite over one kernel.

    Args:
        name: of a registered kernel.
        grid: how many combinations.
        groups: names of groups; None = all.
        threads: thread counts that comparisons are repeated with.
        progress: called with each group that has ended.

    Raises:
        NoKernelError: there is no kernel of that name.
    """
    target = Target(name, threads=threads)
    before = comparisons()
    done: list[GroupResult] = []
    groups = list(GROUPS if groups is None else groups)
    unbound = ""
    try:
        _ = target.bound
    except Exception as error:  # the declaration group says why; the others cannot run
        unbound = "the kernel does not bind"
        if "declaration" not in groups:
            unbound = f"{unbound}: {_message(error)}"
    for group in groups:
        result = _run_group(target, group, grid, unbound)
        done.append(result)
        if progress is not None:
            progress(result)
    return {
        "kernel": name,
        "numerics": str(target.spec.numerics),
        "comparisons": comparisons() - before,
        "groups": done,
    }


def _run_group(target: Target, name: str, grid: Grid, unbound: str) -> GroupResult:
    failures: list[Failure] = []
    skips: list[Skip] = []
    count = 0
    start = time.perf_counter()
    for case in GROUPS[name](grid):
        if unbound and name != "declaration":
            skips.append({"case": case.name, "reason": unbound})
            continue
        try:
            case.run_on(target)
            count += 1
        except CaseSkipped as reason:
            skips.append({"case": case.name, "reason": str(reason)})
        except Exception as error:
            failures.append({"case": case.name, "message": _message(error)})
    return {
        "name": name,
        "passed": count,
        "failed": len(failures),
        "skipped": len(skips),
        "seconds": round(time.perf_counter() - start, 3),
        "failures": failures,
        "skips": skips,
    }


def _message(error: BaseException) -> str:
    text = str(error).strip()
    return text if isinstance(error, AssertionError) and text else f"{type(error).__name__}: {text}"


def passed(result: Result) -> bool:
    """Whether no case failed, and some case ran."""
    return not any(g["failed"] for g in result["groups"]) and any(g["passed"] for g in result["groups"])


def header() -> str:
    """Write the head of the table."""
    return f"{'group':<14}{'passed':>8}{'failed':>8}{'skipped':>9}{'seconds':>9}"


def format_group(group: GroupResult) -> str:
    """Write one line of the table."""
    return f"{group['name']:<14}{group['passed']:>8}{group['failed']:>8}{group['skipped']:>9}{group['seconds']:>9.1f}"


def format_result(result: Result, *, with_table: bool = True) -> str:
    """Write the table, then every failure and each reason for skipping once."""
    lines: list[str] = []
    if with_table:
        lines += [header(), *map(format_group, result["groups"])]
    reasons: dict[str, int] = {}
    for group in result["groups"]:
        for skipped in group["skips"]:
            reasons[skipped["reason"]] = reasons.get(skipped["reason"], 0) + 1
        for failure in group["failures"]:
            lines.append(f"FAILED {group['name']}-{failure['case']}: {failure['message']}")
    lines += [f"skipped {count}: {reason}" for reason, count in reasons.items()]
    ran = sum(group["passed"] for group in result["groups"])
    failed = sum(group["failed"] for group in result["groups"])
    skipped_cases = sum(group["skipped"] for group in result["groups"])
    kind = "bit-exact comparisons" if result["numerics"] == "bitwise" else "comparisons"
    lines.append(
        f"{result['kernel']}: {ran} passed, {failed} failed, {skipped_cases} skipped; {result['comparisons']} {kind}"
    )
    if result["numerics"] != "bitwise":
        lines.append(f"compared as declared: {result['numerics']}")
    return "\n".join(lines)
