"""Which Python runs a peer: --python NAME=PATH, else $PEERS_DIR/NAME, else this one where that will do."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from peer import CannotRun, Peer


def interpreter(peer: Peer, named: Mapping[str, Path]) -> Path:
    """The interpreter of the peer's environment.

    Args:
        peer: whose.
        named: from --python.

    Raises:
        CannotRun: where it is missing; says how to name it.
    """
    name = peer.environment
    advice = f"create the environment (README.md) or name its interpreter with --python {name}=PATH"
    if name in named:
        return _runnable(named[name], advice)
    folder = os.environ.get("PEERS_DIR")
    if folder and (Path(folder) / name).is_dir():
        return _runnable(Path(folder) / name / "bin" / "python", advice)
    if peer.own_python:
        return Path(sys.executable)
    where = f"{folder} has no {name}" if folder else "PEERS_DIR is not set"
    raise CannotRun(f"no interpreter: {where}; {advice}")


def _runnable(path: Path, advice: str) -> Path:
    if not path.is_file():
        raise CannotRun(f"no interpreter: {path} is no file; {advice}")
    if not os.access(path, os.X_OK):
        raise CannotRun(f"no interpreter: {path} may not be executed; {advice}")
    return path.absolute()  # not resolved: a virtual environment's python is a link


def environment_variables(peer: Peer, python: Path, threads: int) -> dict[str, str]:
    """The variables of a worker: ours, without what belongs to our interpreter, with the peer's own."""
    variables = dict(os.environ)
    if python != Path(sys.executable):
        for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
            variables.pop(name, None)
    # Pools must not start wider than asked for.
    variables["OMP_NUM_THREADS"] = str(threads)
    if peer.bind_threads:
        variables.setdefault("OMP_PROC_BIND", "true")
        variables.setdefault("OMP_PLACES", "threads")
    for name, value in peer.variables:
        variables[name] = value.format(environment=python.parent.parent, threads=threads)
    return variables
