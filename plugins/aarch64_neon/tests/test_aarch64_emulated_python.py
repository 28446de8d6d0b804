"""The installed wheel in an emulated Python: what is listed on each CPU model, and the conformance suite on each tier.

INT8MOE_TEST_ARM64 names a folder that emulation/arm64_root.py made; INT8MOE_TEST_ARM64_GRID=all runs the suite's whole grid.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from arm64_programs import PLUGIN, REFUSALS

from int8moe_aarch64_neon import probe

SCRIPT = PLUGIN / "tests" / "emulation" / "arm64_root.py"
FOLDER = os.environ.get("INT8MOE_TEST_ARM64", "")
GRID = os.environ.get("INT8MOE_TEST_ARM64_GRID", "")
# Emulation is slow: the exact sums and the routing, which the programs of test_aarch64_emulated_tiers.py try as well, are
# left to the whole grid.
QUICK = ("declaration", "packing", "strides", "special", "rows")

pytestmark = pytest.mark.skipif(
    not FOLDER, reason="INT8MOE_TEST_ARM64 is not set; `make arm64-root` makes the folder that it names"
)


def run(model: str, *arguments: str, cap: str = "", timeout: float = 7200) -> subprocess.CompletedProcess[str]:
    """Run the emulated Python; ``cap`` is its INT8MOE_MAX_ISA."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("INT8MOE_")}
    if cap:
        environment["INT8MOE_MAX_ISA"] = cap
    return subprocess.run(
        [sys.executable, str(SCRIPT), "run", FOLDER, "--model", model, "--", *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.mark.parametrize("model", REFUSALS)
def test_each_model_lists_what_it_can_run(model: str):
    """Exit status 0, a reason for each tier that is refused, and the strongest other one first."""
    done = run(model, "-m", "int8moe", "list-kernels", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(done.stdout)
    rows = {row["name"]: row for row in document["kernels"]}
    expected = {f"aarch64_neon.{tier}": reason for tier, reason in REFUSALS[model].items()}
    assert {name: rows[name]["reason"] or None for name in expected} == expected
    assert {name: rows[name]["available"] for name in expected} == {n: reason is None for n, reason in expected.items()}


# On cortex-a72 torch's own wheel dies while it is imported, so the weakest tier is chosen by a cap.
@pytest.mark.parametrize(
    ("model", "cap", "tier"),
    [("neoverse-n1", "", "dotprod"), ("neoverse-n1", "neon", "neon"), ("max,sve=off", "", "i8mm")],
)
def test_the_strongest_usable_tier_is_chosen(model: str, cap: str, tier: str):
    code = (
        "import int8moe; config = int8moe.MoEConfig(num_experts=4, top_k=2, hidden_size=64, intermediate_size=64); "
        "print(int8moe.FusedMoE(config).kernel.name)"
    )
    done = run(model, "-c", code, cap=cap)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == [f"aarch64_neon.{tier}"]


@pytest.mark.parametrize("tier", probe.TIERS)
def test_conformance(tier: str):
    grid = ["--grid", GRID] if GRID else ["--grid", "reduced", "--threads", "1,2"]
    groups = [] if GRID else [option for group in QUICK for option in ("--group", group)]
    done = run("max,sve=off", "-m", "int8moe.testing", f"aarch64_neon.{tier}", *grid, *groups)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"aarch64_neon.{tier}: " in done.stdout
    assert " 0 failed" in done.stdout


def test_the_wheel_is_what_it_says():
    (wheel,) = Path(FOLDER, "wheels").glob("int8moe_aarch64_neon-*.whl")
    checked = subprocess.run(
        [sys.executable, str(PLUGIN / "checks" / "check_wheel.py"), str(wheel)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
