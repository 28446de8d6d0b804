"""Runs a probe in a child of a process that has imported torch: where fork is safe that costs no second import."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from .outcome import GRACE_SECONDS, Outcome


def run_in_child(probe: str, limit: float, *arguments: str) -> Outcome:
    """Run a probe of :data:`int8moe.diagnosis.probes.PROBES` to its end, or for ``limit`` seconds."""
    context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    with tempfile.TemporaryDirectory() as folder:
        stdout, stderr = Path(folder) / "stdout", Path(folder) / "stderr"
        child = context.Process(target=_child, args=(stdout, stderr, [probe, f"{limit:g}", *arguments]))
        child.start()
        child.join(limit + GRACE_SECONDS)
        status = child.exitcode
        child.kill()
        child.join()
        texts = [
            path.read_text(encoding="utf-8", errors="replace") if path.exists() else "" for path in (stdout, stderr)
        ]
        return Outcome.read(texts[0], texts[1], status, limit)


def _child(stdout: Path, stderr: Path, arguments: list[str]) -> None:
    for path, number in ((stdout, 1), (stderr, 2)):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    from .probes import main

    main(arguments)
