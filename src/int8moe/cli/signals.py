"""Signals: what one that ended a process says about a kernel, and Ctrl-C where it would do harm."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_MEANING = {
    "SIGILL": "an instruction that this CPU does not have",
    "SIGSEGV": "an access outside its memory",
    "SIGBUS": "an access outside its memory",
    "SIGFPE": "an arithmetic fault",
    "SIGABRT": "an abort in native code",
    "SIGKILL": "killed, for instance for want of memory",
}


def signal_text(number: int) -> str:
    """A signal's name and what it means."""
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
    return f"{name} ({_MEANING[name]})" if name in _MEANING else name


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Ctrl-C takes effect at the end of this block."""
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if noted:
        raise KeyboardInterrupt


@contextlib.contextmanager
def sigterm_unwinds() -> Iterator[None]:
    """SIGTERM leaves this block by SystemExit, so that what it has started is ended with it."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def import_torch() -> None:
    """Import torch, which aborts the process when it is interrupted on the way."""
    from .. import host  # noqa: F401 (it notes the CPUs of this thread, before torch's OpenMP runtime may bind it)

    with held_back():
        import torch  # noqa: F401
