"""``int8moe doctor``: what is wrong with this installation and this machine, and what mends it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import click

from .number import Number
from .output import Verb, write, write_json, write_table
from .signals import sigterm_unwinds

if TYPE_CHECKING:
    from ..diagnosis.finding import Finding

_HEADING_WIDTH = len("distributions")  # the widest, so that the sections stand in line
_STYLES = {"problem": "bold red", "note": "yellow"}


@click.command("doctor", cls=Verb)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option(
    "--time-limit",
    type=Number(min=0, min_open=True),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="What each process may take in which plugins or a kernel run.",
)
def command(as_json: bool, time_limit: float) -> int:
    """Examine this installation and this machine; each problem comes with its mend.

    Versions, plugins and their libraries, what the CPU has by the system and by each plugin's probe, the self-test of
    each kernel, threads, memory, huge pages, OpenMP runtimes, preloads, and INT8MOE_* variables.

    Exits with 1 when there is a problem. Notes, and kernels that are for another machine, are none.
    """
    from ..diagnosis.examination import examine

    with sigterm_unwinds(), _waiting() as tell:
        sections = list(examine(limit=time_limit, tell=tell))
    findings = [finding for _, section in sections for finding in section]
    problems, notes = (sum(row.severity == severity for row in findings) for severity in ("problem", "note"))
    if as_json:
        rows = [row._asdict() for row in findings]
        write_json({"schema": 1, "num_problems": problems, "num_notes": notes, "findings": rows})
    else:
        for name, section in sections:
            _write_section(name, section)
        counts = " and ".join(f"{count} {word}{'' if count == 1 else 's'}"
                              for count, word in ((problems, "problem"), (notes, "note")))  # fmt: skip
        write(counts)
    return int(problems > 0)


def _write_section(name: str, section: list[Finding]) -> None:
    rows: list[tuple[str, str]] = []
    for finding in section:
        rows.append((finding.severity, finding.text))
        if finding.mend:
            rows.append(("mend", finding.mend))
    write_table((name.replace("_", " ").ljust(_HEADING_WIDTH), ""), rows, styles=_STYLES)
    for finding in section:
        if finding.details:
            lines = "\n".join(f"    {line}" for line in finding.details.splitlines())
            write(f"\n  {finding.text}\n{lines}")
    write("")


@contextlib.contextmanager
def _waiting() -> Iterator[Callable[[str], object]]:
    """On a terminal, a line on stderr about what is being waited for; elsewhere nothing."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console

    with Console(stderr=True, markup=False).status("examining") as status:
        yield lambda text: status.update(f"examining {text}")
