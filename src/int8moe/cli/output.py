"""How verbs print: data on stdout, messages on stderr.

Tables on a terminal are rich's; what goes into a pipe or file is plain text, aligned and never cut, and is
made here: importing rich costs a fifth of the CPU time that `int8moe list-kernels` may take.

Only :func:`write` reaches stdout. Plugins and their libraries run in this process and may print, at their import, in
their hooks or from native code: what they print goes to stderr, so that a document stays one document.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TextIO

import click

_FOLDED = 24
"""Wider columns may be folded to this on a narrow terminal; one narrower still gets a block of lines a row."""


_data: TextIO | None = None
"""Stdout for :func:`write` while a verb runs and ``sys.stdout`` is stderr."""


def claim_stdout() -> None:
    """Keep a private duplicate of fd 1 as ``sys.stdout``, and let fd 1 be stderr, for good.

    A stream that the caller closed (``>&-``) becomes one that goes nowhere.
    """
    sys.stderr = sys.stderr or _nowhere(2)
    sys.stdout = sys.stdout or _nowhere(1)
    try:
        if sys.stdout.fileno() != 1:
            return  # somebody has put another stream there, and takes care of it
        private = os.dup(1)
        os.dup2(2, 1)
    except (OSError, ValueError):
        return
    sys.stdout = os.fdopen(private, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)


def _nowhere(number: int) -> TextIO:
    """A stream in place of one that Python does not have because its descriptor was closed; drops what it gets."""
    try:
        os.fstat(number)  # some library's file has got the number by now: leave it alone
    except OSError:
        opened = os.open(os.devnull, os.O_WRONLY)
        if opened != number:
            os.dup2(opened, number)
            os.close(opened)
        return os.fdopen(number, "w", encoding="utf-8", closefd=False)
    return open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123


class Verb(click.Command):
    """A command during which ``sys.stdout`` is stderr; its options and its help still find stdout."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the verb."""
        with _others_print_on_stderr():
            return super().invoke(ctx)


@contextlib.contextmanager
def _others_print_on_stderr() -> Iterator[None]:
    global _data
    _data = sys.stdout
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _data = None


def _stdout() -> TextIO | None:
    """Where data goes; None when the caller closed it."""
    return _data or sys.stdout


def write(text: str, end: str = "\n") -> bool:
    """Print on stdout. When the reader has gone, this and everything later is dropped without a word.

    Returns:
        False when this call found that the reader has gone.
    """
    stream = _stdout()
    if stream is None:
        return True
    try:
        stream.write(f"{text}{end}")
        stream.flush()
    except BrokenPipeError:
        discard_stdout()
        return False
    return True


def discard_stdout() -> None:
    """Let stdout go nowhere, so that the interpreter's own flush at exit does not fail."""
    stream = _stdout()
    with contextlib.suppress(OSError, ValueError):
        if stream is not None:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


def flush() -> None:
    """Write out what either stream still holds."""
    stream = _stdout()
    try:
        if stream is not None:
            stream.flush()
    except OSError:  # nobody reads it any more, or a write failed before and was reported then
        discard_stdout()
    with contextlib.suppress(BrokenPipeError):
        if sys.stderr is not None:
            sys.stderr.flush()


def say(text: str) -> None:
    """Print one message on stderr, after the command's name."""
    with contextlib.suppress(BrokenPipeError):
        if sys.stderr is not None:
            print(f"int8moe: {text}", file=sys.stderr, flush=True)


def write_json(document: Any) -> None:
    """Print one JSON document."""
    write(json.dumps(document, indent=2))


def write_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    right: Sequence[str] = (),
    styles: Mapping[str, str] | None = None,
) -> None:
    """Print a table; on a narrow terminal its wide columns are folded, never cut.

    Args:
        columns: headings.
        rows: one value a column.
        right: headings of columns that are aligned to the right.
        styles: rich's style of a row on a terminal, by its first value.
    """
    cells = [[" ".join(str(value).split()) for value in row] for row in rows]
    stream = _stdout()
    if stream is None or not stream.isatty():
        write(_plain(columns, cells, right))
        return
    from rich.console import Console
    from rich.table import Table

    # Asked for here, because rich takes every TERM=dumb for 80 columns wide.
    width, height = _terminal_size(stream)
    console = Console(file=stream, width=width, height=height, markup=False, emoji=False, highlight=False)
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
        table.add_row(*row, style=(styles or {}).get(row[0]))
    console.print(table)


def _terminal_size(stream: TextIO) -> os.terminal_size:
    """As shutil has it, which would ask fd 1."""
    columns, lines = (os.environ.get(name, "") for name in ("COLUMNS", "LINES"))
    try:
        found = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        found = os.terminal_size((0, 0))
    width = int(columns) if columns.isdecimal() else 0
    height = int(lines) if lines.isdecimal() else 0
    return os.terminal_size((width or found.columns or 80, height or found.lines or 24))


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
