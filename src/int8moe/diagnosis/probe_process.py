"""Starts probes in processes of their own, and reads what they report whatever becomes of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import IO

from .outcome import GRACE_SECONDS, Outcome

# With the path of this process: "-m" would put the working folder before everything else.
_START = (
    "import os, sys; sys.path[:] = sys.argv.pop(1).split(os.pathsep); "
    "from int8moe.diagnosis.probes import main; sys.exit(main(sys.argv[1:]))"
)
_WORKERS = 2


class Probes:
    """Runs probes, two at the same time; leaving the block ends those that still run.

    Attributes:
        limit: seconds that each one may take.
        environment: variables of the probes.
    """

    def __init__(self, limit: float, environment: Mapping[str, str]) -> None:
        self.limit = limit
        self.environment = environment
        self._pool = ThreadPoolExecutor(max_workers=_WORKERS)
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._closed = False

    def __enter__(self) -> Probes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._closed = True
            for process in self._running:
                _kill(process)
        self._pool.shutdown(wait=True, cancel_futures=True)

    def start(self, probe: str, *arguments: str, limit: float | None = None) -> Future[Outcome]:
        """Begin a probe of :data:`int8moe.diagnosis.probes.PROBES`.

        Args:
            probe: its name.
            arguments: what it takes.
            limit: seconds that it may take, where that is not the limit of all.
        """
        return self._pool.submit(self._run, probe, arguments, dict(self.environment), limit or self.limit)

    def _run(self, probe: str, arguments: tuple[str, ...], environment: dict[str, str], limit: float) -> Outcome:
        # Files, not pipes: a pipe stays open as long as any child that a plugin has started holds it.
        with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
            process = self._popen((probe, f"{limit:g}", *arguments), environment, stdout, stderr)
            if process is None:
                return Outcome(ended="was not started")
            status: int | None = None
            try:
                status = process.wait(limit + GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                pass
            finally:
                with self._lock:
                    _kill(process)
                    self._running.discard(process)
                process.wait()
            return Outcome.read(_text(stdout), _text(stderr), status, limit)

    def _popen(
        self, arguments: tuple[str, ...], environment: dict[str, str], stdout: IO[bytes], stderr: IO[bytes]
    ) -> subprocess.Popen[bytes] | None:
        with self._lock:
            if self._closed:
                return None
            process = subprocess.Popen(
                [sys.executable, "-c", _START, os.pathsep.join(map(str, sys.path)), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=environment,
                start_new_session=True,  # so that Ctrl-C comes to us alone, and its own children can be ended with it
            )
            self._running.add(process)
            return process


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process that still runs, with what it has started."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            if hasattr(os, "killpg"):
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()


def _text(stream: IO[bytes]) -> str:
    stream.seek(0)
    return stream.read().decode("utf-8", errors="replace")
