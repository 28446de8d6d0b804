"""How ``make gpu-check`` reports its steps; the steps themselves take a device. Needs no triton."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "checks" / "gpu_check.py"


@pytest.fixture
def gpu_check() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    before = signal.signal(signal.SIGALRM, module._end)
    yield module
    signal.signal(signal.SIGALRM, before)


def too_long() -> str:
    try:
        signal.raise_signal(signal.SIGALRM)  # as the clock does
    except Exception:
        return "took it for the failure of a case"
    return "was not broken off"


def fails() -> str:
    raise ValueError("first line\n second")


def test_a_step_that_takes_too_long_is_broken_off(gpu_check: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """The limit holds within a step, and the steps after it do not begin."""
    steps = {"fine": lambda: "right", "fails": fails, "long": too_long, "next": lambda: "right"}
    assert gpu_check.run_steps(steps) == ["fails", "long", "next"]
    lines = capsys.readouterr().out.splitlines()
    assert [line.rpartition(" (")[0] for line in lines] == [
        "fine: right",
        "fails: FAILED: ValueError: first line second",
        "long: BROKEN OFF: 330 s are over",
        "next: LEFT OUT: 330 s are over",
    ]


def test_without_a_device_it_is_skipped_not_passed(
    gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # main() takes it away; this gives it back
    monkeypatch.setattr(gpu_check.probe, "read_facts", gpu_check.probe.Facts)
    assert gpu_check.main() == 0
    assert capsys.readouterr().out.startswith("gpu-check: SKIPPED: no GPU")


def test_a_python_without_int8moe_is_one_line() -> None:
    done = subprocess.run([sys.executable, "-I", "-S", str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("gpu-check: int8moe_triton_gpu is not installed for ")
    assert "pip install . ./plugins/triton_gpu" in done.stderr
    assert len(done.stderr.splitlines()) == 1
