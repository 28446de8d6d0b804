"""``int8moe verify``: the conformance suite on one kernel, in a process of its own.

A kernel under test may end its process. That is a finding about the group of cases which was running, and the
groups after it are run in a new process.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

import click

from .output import Verb, say, write, write_json, write_table
from .signals import held_back, signal_text, sigterm_unwinds

_SHOWN_FAILURES = 20


@dataclass
class Results:
    """What became of the suite."""

    groups: list[dict[str, Any]] = field(default_factory=list)
    numerics: str = ""
    comparisons: int = 0

    @property
    def passed(self) -> bool:
        """Whether the kernel conforms: nothing failed, and something ran."""
        return not any(group["failed"] for group in self.groups) and any(group["passed"] for group in self.groups)


@click.command("verify", cls=Verb)
@click.argument("kernel", metavar="KERNEL")
@click.option("--quick", is_flag=True, help="Fewer combinations, for while a kernel is being written.")
@click.option("--group", "groups", multiple=True, metavar="NAME", help="Only this group of cases; may be repeated.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(kernel: str, quick: bool, groups: tuple[str, ...], as_json: bool) -> int:
    """Run the conformance suite on one kernel: its declaration, packing, bits, routing, refusals and more.

    Exits with 1 when a case fails or the kernel ends the process.
    """
    from ..errors import NoKernelError
    from ..listing import why_not_here
    from ..testing.group_names import GROUP_NAMES

    if unknown := [name for name in groups if name not in GROUP_NAMES]:
        raise click.BadParameter(f"{', '.join(unknown)}: groups are {', '.join(GROUP_NAMES)}", param_hint="'--group'")
    reason = why_not_here(kernel)
    if reason is not None:
        raise NoKernelError(f"kernel {kernel!r} cannot be verified on this machine: {reason}")
    results = run_suite(kernel, "reduced" if quick else "default", groups)
    if as_json:
        write_json({"schema": 1, "kernel": kernel, "passed": results.passed, **vars(results)})
    else:
        _write(kernel, results)
    if not results.passed:
        failed = sum(group["failed"] for group in results.groups)
        say(f"error: kernel {kernel!r} does not conform: {f'{failed} cases failed' if failed else 'no case ran'}")
    return int(not results.passed)


def run_suite(kernel: str, grid: str, groups: Sequence[str] = ()) -> Results:
    """Run groups of cases (all, when none is named), in as many processes as it takes."""
    results = Results()
    remaining = list(groups)
    while True:
        before = len(results.groups)
        known, status = _run_groups(kernel, grid, remaining, results)
        names = remaining or known
        done = len(results.groups) - before
        if status == 0 and done == len(names):
            return results
        ended = signal_text(-status) if status < 0 else f"status {status}"
        name = names[done] if done < len(names) else "suite"
        failure = {"case": "process", "message": f"the process was ended: {ended}"}
        say(f"{name}: {failure['message']}")
        results.groups.append(
            {"name": name, "passed": 0, "failed": 1, "skipped": 0, "seconds": 0.0, "failures": [failure], "skips": []}
        )
        remaining = names[done + 1 :]
        if not remaining:
            return results


def _run_groups(kernel: str, grid: str, groups: list[str], results: Results) -> tuple[list[str], int]:
    """Run groups (all, when none is named) in one process.

    Returns:
        The names of all groups that there are, and the exit status of the process.
    """
    with sigterm_unwinds(), _suite_process([kernel, grid, *groups]) as process:
        assert process.stdout is not None
        known = _read(process.stdout, results)
        status = process.wait()
    return known, status


def _read(lines: IO[str], results: Results) -> list[str]:
    names: list[str] = []
    for line in lines:
        try:
            document = json.loads(line)
        except ValueError:
            break  # cut off by the end of the process
        if isinstance(document, list):
            names = document
        elif "comparisons" in document:
            results.numerics = document["numerics"]
            results.comparisons += document["comparisons"]
        else:
            results.groups.append(document)
            counts = ", ".join(f"{document[key]} {key}" for key in ("passed", "failed", "skipped") if document[key])
            say(f"{document['name']}: {counts or 'no cases'} ({document['seconds']:.1f} s)")
    return names


@contextlib.contextmanager
def _suite_process(arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
    """Start the suite. When the block is left early, by Ctrl-C or SIGTERM, it ends with its own children."""
    process = None
    try:
        with held_back():
            process = subprocess.Popen(
                [sys.executable, "-m", "int8moe.cli.suite_process", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                start_new_session=True,  # so that Ctrl-C comes to us alone
            )
        yield process
    finally:
        if process is not None and process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                if hasattr(os, "killpg"):
                    os.killpg(process.pid, signal.SIGKILL)
                else:
                    process.kill()
            process.wait()


def _write(kernel: str, results: Results) -> None:
    columns = ("group", "passed", "failed", "skipped", "seconds", "result")
    rows = [
        (
            group["name"],
            group["passed"],
            group["failed"],
            group["skipped"],
            f"{group['seconds']:.1f}",
            _result(group),
        )
        for group in results.groups
    ]
    write_table(columns, rows, right=columns[1:5])
    for group in results.groups:
        failures = group["failures"]
        for failure in failures[:_SHOWN_FAILURES]:
            write(f"FAILED {group['name']}: {failure['case']}: {' '.join(failure['message'].split())}")
        if len(failures) > _SHOWN_FAILURES:
            write(f"FAILED {group['name']}: {len(failures) - _SHOWN_FAILURES} more (--json has all)")
    if results.passed:
        cases = sum(group["passed"] for group in results.groups)
        write(f"\n{kernel} passes ({results.numerics}): {cases} cases, {results.comparisons} comparisons")


def _result(group: dict[str, Any]) -> str:
    reasons = "; ".join(sorted({skip["reason"] for skip in group["skips"]}))
    verdict = "FAILED" if group["failed"] else "ok" if group["passed"] else "not run"
    return f"{verdict} (skipped: {reasons})" if reasons else verdict
