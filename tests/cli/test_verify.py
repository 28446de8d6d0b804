"""``int8moe verify``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from int8moe.cli.verify import Results, _write

from .conftest import SELF_TEST_HIDDEN, Command

QUICK = ("--quick", "--group", "declaration")


def test_sound_kernel(int8moe: Command) -> None:
    done = int8moe("verify", "reference.torch", *QUICK)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].split()[:4] == ["group", "passed", "failed", "skipped"]
    assert any(line.startswith("declaration ") and line.endswith(" ok") for line in done.stdout.splitlines())
    assert "reference.torch passes" in done.stdout


def test_unknown_kernel_has_near_names(int8moe: Command) -> None:
    assert "did you mean reference.torch?" in int8moe.error("verify", "reference.troch")


def test_unavailable_kernel(int8moe: Command, plugins: Any) -> None:
    plugins.add_good("zvx", isa='(("zvx9",),)')
    assert "zvx9" in int8moe.error("verify", "zvx.fast", site=plugins.folder)


def test_unknown_group(int8moe: Command, without_torch: Path) -> None:
    groups = ("--group", "declaration", "--group", "nope")
    line = int8moe.error("verify", "reference.torch", *groups, status=2, site=without_torch)
    assert "nope: groups are declaration, packing, " in line


def test_kernel_that_ends_the_process(int8moe: Command, troubled: Callable[..., Path]) -> None:
    """The crash is a finding about one group; those after it still run. What a kernel prints is not in the document."""
    crash = f"layer.config.hidden_size == {SELF_TEST_HIDDEN} or os.kill(os.getpid(), signal.SIGSEGV)"
    site = troubled(apply=crash, pack="print('noise', flush=True)")
    groups = ("--group", "refusals", "--group", "declaration")
    document = int8moe.json("verify", "acme.fast", "--quick", *groups, status=1, site=site)
    assert list(document) == ["schema", "kernel", "passed", "groups", "numerics", "comparisons"]
    assert document["passed"] is False
    refusals, declaration = document["groups"]
    assert refusals["name"] == "refusals"
    assert refusals["failed"] == 1
    assert "SIGSEGV" in refusals["failures"][0]["message"]
    assert declaration["name"] == "declaration"
    assert declaration["passed"] > 0


def test_failures_stand_below_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    failures = [{"case": f"m{m}", "message": "bits differ\nin one place"} for m in range(22)]
    skips = [{"case": "b", "reason": "no bias"}, {"case": "c", "reason": "no bias"}]
    results = Results(
        [
            {
                "name": "bits",
                "passed": 3,
                "failed": 22,
                "skipped": 0,
                "seconds": 1.25,
                "failures": failures,
                "skips": [],
            },
            {"name": "rows", "passed": 2, "failed": 0, "skipped": 2, "seconds": 0.5, "failures": [], "skips": skips},
        ],
        numerics="bitwise",
    )
    assert not results.passed
    _write("acme.fast", results)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["bits", "3", "22", "0", "1.2", "FAILED"]
    assert lines[2].endswith("ok (skipped: no bias)")
    assert lines[3] == "FAILED bits: m0: bits differ in one place"
    assert lines[-1] == "FAILED bits: 2 more (--json has all)"


def test_nothing_that_ran_is_no_pass() -> None:
    assert not Results().passed
