"""How tables, errors and times are printed."""

from __future__ import annotations

import os
import signal
import struct
import sys

import pytest

from int8moe.cli.app import error_line
from int8moe.cli.output import write_table
from int8moe.cli.progress import human_bytes
from int8moe.cli.run import human_seconds
from int8moe.cli.signals import signal_text

COLUMNS = ("name", "count", "reason")
REASON = "[bold]needs an instruction set that this machine does not have, and a library[/bold] that is not here"
ROWS = [("a.kernel", 3, "fine"), ("another.kernel", 12, REASON)]


def test_plain_table(capsys: pytest.CaptureFixture[str]) -> None:
    write_table(COLUMNS, [*ROWS, ("x", 1, "two\nlines")], right=("count",))
    assert capsys.readouterr().out.splitlines() == [
        "name            count  reason",
        "a.kernel            3  fine",
        f"another.kernel     12  {REASON}",
        "x                   1  two lines",
    ]


def test_empty_table(capsys: pytest.CaptureFixture[str]) -> None:
    write_table(COLUMNS, [])
    assert capsys.readouterr().out == "name  count  reason\n"


def on_terminal(width: int) -> str:
    """What a table looks like on a terminal of that width."""
    pty = pytest.importorskip("pty")
    import fcntl
    import termios

    child, terminal = pty.fork()
    if child == 0:
        try:
            os.environ["TERM"] = "dumb"
            os.environ.pop("COLUMNS", None)
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 30, width, 0, 0))
            sys.stdout = os.fdopen(1, "w")
            sys.stdin = os.fdopen(0)
            sys.__stdout__, sys.__stdin__, sys.__stderr__ = sys.stdout, sys.stdin, sys.stdout
            write_table(COLUMNS, ROWS)
            sys.stdout.flush()
        finally:
            os._exit(0)
    output = b""
    while True:
        try:
            block = os.read(terminal, 65536)
        except OSError:
            break
        if not block:
            break
        output += block
    os.close(terminal)
    os.waitpid(child, 0)
    return output.decode().replace("\r\n", "\n")


@pytest.mark.parametrize("width", [200, 60, 30])
def test_terminal_table_loses_nothing(width: int) -> None:
    text = on_terminal(width)
    if width >= 60:
        assert all(len(line) <= width for line in text.splitlines())
    assert "…" not in text
    words = text.split()
    position = 0
    for word in REASON.split():
        position = words.index(word, position)
    assert "another.kernel" in words
    assert (text.splitlines()[0].split() == list(COLUMNS)) == (width >= 60)


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError


def test_error_line() -> None:
    assert error_line(ValueError("first:\n  second\n  third.\nfourth")) == "first: second; third. fourth"
    assert error_line(ValueError()) == "ValueError"
    assert error_line(Unprintable()) == "Unprintable"
    assert error_line(FileNotFoundError(2, "No such file or directory", "x.json")) == (
        "x.json: No such file or directory"
    )
    assert error_line(OSError(28, "No space left on device")) == "No space left on device"


def test_units() -> None:
    assert [human_bytes(n) for n in (0, 1023, 1536, 5 << 20, 3 << 30)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 MiB",
        "3.0 GiB",
    ]
    assert [human_seconds(s) for s in (0.0, 25e-6, 1.5e-3, 0.0255, 0.25, 2.0, 250.0)] == [
        "0.00 us",
        "25.0 us",
        "1.50 ms",
        "25.5 ms",
        "250 ms",
        "2.00 s",
        "250 s",
    ]


def test_signals() -> None:
    assert signal_text(signal.SIGILL).startswith("SIGILL (an instruction")
    assert signal_text(signal.SIGTERM) == "SIGTERM"
    assert signal_text(200) == "signal 200"
