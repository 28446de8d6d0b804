"""A worker as the runner sees it: started, asked, kept still between its turns, and ended.

Between its turns a worker is stopped (SIGSTOP), so that the threads of a library that spins while it has nothing to do
take no time from the peer whose turn it is.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from int8moe.cli.signals import signal_text

_SCRIPT = Path(__file__).resolve().parent / "worker.py"
_STAGES = {
    "load": "while it loaded",
    "check": "while it was checked",
    "prepare": "while it made its inputs",
    "block": "while it was timed",
}
_SECONDS_TO_END = 10.0


class PeerFailed(Exception):
    """A peer has no figures; the text is the reason for its row."""


class WorkerProcess:
    """One process with a peer in it."""

    def __init__(self, python: Path, variables: Mapping[str, str], limit: float) -> None:
        """Start it.

        Args:
            python: its interpreter.
            variables: its environment variables.
            limit: seconds that an answer may take.

        Raises:
            PeerFailed: if it does not start.
        """
        self._limit = limit
        self._received = b""
        self._ended = ""
        self._messages = tempfile.TemporaryFile()  # noqa: SIM115 (closed by end)
        try:
            self._process = subprocess.Popen(
                [str(python), "-u", str(_SCRIPT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._messages,
                env=dict(variables),
                preexec_fn=os.setpgrp,  # so that Ctrl-C comes to the runner alone
            )
        except OSError as error:
            self._messages.close()
            raise PeerFailed(f"{python} does not start: {error.strerror}") from None

    def ask(self, order: str, **arguments: Any) -> dict[str, Any]:
        """Wake it, have one order carried out, and let it sleep again.

        Raises:
            PeerFailed: with the reason that it gave, or what ended it; one that does not answer in time is ended.
        """
        assert self._process.stdin is not None
        if self._ended:
            raise PeerFailed(self._ended)
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps({"order": order, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failed(self._how_it_ended(order)) from None
        answer: dict[str, Any] = json.loads(self._read_line(order))
        self._signal(signal.SIGSTOP)
        if "reason" in answer:
            raise PeerFailed(answer["reason"])
        return answer

    def end(self) -> None:
        """Kill it, if it has not ended."""
        self._signal(signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_SECONDS_TO_END)
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                assert pipe is not None
                pipe.close()
        self._messages.close()

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def _read_line(self, order: str) -> bytes:
        assert self._process.stdout is not None
        deadline = time.monotonic() + self._limit
        poll = select.poll()
        poll.register(self._process.stdout, select.POLLIN)
        while b"\n" not in self._received:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                self._signal(signal.SIGKILL)
                raise self._failed(f"ended: no answer within {self._limit:g} s {_STAGES[order]}{self._last_words()}")
            received = os.read(self._process.stdout.fileno(), 1 << 16)
            if not received:
                raise self._failed(self._how_it_ended(order))
            self._received += received
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _failed(self, reason: str) -> PeerFailed:
        """For good: later orders fail with the same reason."""
        self._ended = reason
        return PeerFailed(reason)

    def _how_it_ended(self, order: str) -> str:
        try:
            status = self._process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            return f"closed its pipe {_STAGES[order]}, and went on{self._last_words()}"
        what = signal_text(-status) if status < 0 else f"status {status}"
        return f"ended by {what} {_STAGES[order]}{self._last_words()}"

    def _last_words(self) -> str:
        """The last line on its stderr, for the reason."""
        self._messages.seek(0)
        lines = self._messages.read().decode(errors="replace").strip().splitlines()
        return f"; it said: {lines[-1].strip()[:200]}" if lines else ""
