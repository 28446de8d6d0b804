"""The runner of benchmarks/peers as a command, with peers that misbehave."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from peers_folder import PEERS

MISBEHAVING = '''
import os, signal, time

from peer import Adapter, CannotRun, Peer


def fake(name, adapter, **more):
    return Peer(name, "a fake", "fake", adapter, own_python=True, **more)


PEERS = (
    fake("dies", "Dies"),
    fake("dies-late", "DiesLate"),
    fake("hangs", "Hangs", limit=1.0),
    fake("refuses", "Refuses"),
    fake("raises", "Raises"),
    fake("wrong", "Wrong"),
    Peer("absent", "a fake", "absent", "Dies"),
)


class Dies(Adapter):
    def __init__(self, *arguments):
        os.kill(os.getpid(), signal.SIGILL)


class Hangs(Adapter):
    def __init__(self, *arguments):
        time.sleep(1000)


class Refuses(Adapter):
    def __init__(self, *arguments):
        raise CannotRun("this CPU has no abacus")


class Raises(Adapter):
    def __init__(self, *arguments):
        raise ImportError("libabacus.so: cannot open\\nand more")


class Wrong(Adapter):
    """Zeros; chatters on stdout; takes one token a call only."""

    def version(self):
        return "wrong 1.0"

    def pack(self, weights):
        os.write(1, b"packing...\\n")

    def run(self, packed, hidden_states, topk_ids, topk_weights):
        if len(hidden_states) == 4:
            raise ValueError("four tokens are too many")
        return hidden_states * 0


class DiesLate(Wrong):
    calls = 0

    def run(self, packed, hidden_states, topk_ids, topk_weights):
        self.calls += 1
        if self.calls > 20:
            os.write(2, b"assertion failed: abacus\\n")
            os.abort()
        return hidden_states * float("nan")
'''


@pytest.fixture(scope="session")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of peers that die, hang, refuse, raise, compute something else or have no interpreter."""
    folder = tmp_path_factory.mktemp("adapters")
    (folder / "misbehaving.py").write_text(MISBEHAVING)
    return folder


@pytest.fixture(scope="session")
def compare(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the command to its end."""
    folder = tmp_path_factory.mktemp("cwd")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, str(PEERS / "run.py"), *arguments],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert "Traceback" not in done.stderr + done.stdout
        return done

    return run
