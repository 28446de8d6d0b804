"""How verbs print: data on stdout, messages on stderr.

Tables on a terminal are rich's; what goes into a pipe or file is plain text, aligned and never cut, and is
made here: importing rich costs a fifth of the CPU time that `int8moe list-kernels` may take.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

_FOLDED = 24
"""Wider columns may be folded to this on a narrow terminal; one narrower still gets a block of lines a row."""


def write(text: str) -> None:
    """Print on stdout. When the reader has gone, this and everything later is dropped without a word."""
    try:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        discard_stdout()


def discard_stdout() -> None:
    """Let stdout go nowhere, so that the interpreter's own flush at exit does not fail."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def say(text: str) -> None:
    """Print one message on stderr, after the command's name."""
    with contextlib.suppress(BrokenPipeError):
        print(f"int8moe: {text}", file=sys.stderr, flush=True)


def write_json(document: Any) -> None:
    """Print one JSON document."""
    write(json.dumps(document, indent=2))


def write_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, right: Sequence[str] = ()) -> None:
    """Print a table; on a narrow terminal its wide columns are folded, never cut.

    Args:
        columns: headings.
        rows: one value a column.
        right: headings of columns that are aligned to the right.
    """
    cells = [[" ".join(str(value).split()) for value in row] for row in rows]
    if not sys.stdout.isatty():
        write(_plain(columns, cells, right))
        return
    import shutil

    from rich.console import Console
    from rich.table import Table

    # Asked for here, because rich takes every TERM=dumb for 80 columns wide.
    width, height = shutil.get_terminal_size()
    console = Console(width=width, height=height, markup=False, emoji=False, highlight=False)
    natural = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    if width < sum(2 + min(column, _FOLDED) for column in natural):
        write("\n\n".join(_block(columns, row) for row in cells))
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading, longest in zip(columns, natural, strict=True):
        table.add_column(
            heading,
            justify="right" if heading in right else "left",
            overflow="fold",
            no_wrap=longest <= _FOLDED,
            min_width=min(longest, _FOLDED),
        )
    for row in cells:
        table.add_row(*row)
    console.print(table)


def _plain(columns: Sequence[str], cells: Sequence[Sequence[str]], right: Sequence[str]) -> str:
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    lines = []
    for row in (columns, *cells):
        padded = [
            text.rjust(width) if heading in right else text.ljust(width)
            for heading, text, width in zip(columns, row, widths, strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def _block(columns: Sequence[str], row: Sequence[str]) -> str:
    width = max(map(len, columns))
    return "\n".join(f"{heading.ljust(width)}  {text}" for heading, text in zip(columns, row, strict=True) if text)


def host_line() -> str:
    """This machine as selection sees it, with the number of threads and where that is from."""
    from ..host import this_host

    host = this_host()
    threads = f"{host.num_threads} thread{'s' if host.num_threads != 1 else ''}"
    return f"{host.machine} {host.system}, {threads} ({host.num_threads_source})"
