"""The native tiers on emulated processors: the reference's bits, far offsets, and what the probe says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import arm64_programs
import pytest
from arm64_programs import ILLEGAL_INSTRUCTION, NATIVE, PLUGIN, REFUSALS, run

from int8moe_aarch64_neon import probe

RUNNABLE = [(model, tier) for model, tiers in REFUSALS.items() for tier, reason in tiers.items() if reason is None]
REFUSED = [(model, tier) for model, tiers in REFUSALS.items() for tier, reason in tiers.items() if reason is not None]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if reason := arm64_programs.refusal():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("arm64")
    arm64_programs.build(folder)
    return folder


@pytest.fixture(scope="module")
def vectors(programs: Path) -> Path:
    path = programs / "vectors.bin"
    subprocess.run([sys.executable, str(NATIVE / "write_vectors.py"), str(path)], check=True)
    return path


@pytest.mark.parametrize(("model", "tier"), RUNNABLE)
def test_every_vector_has_the_bits_of_the_reference(programs: Path, vectors: Path, model: str, tier: str):
    done = run(model, programs / "check_vectors", vectors, tier)
    assert done.returncode == 0, done.stdout + done.stderr
    *cases, summary = done.stdout.splitlines()
    assert len(cases) > 90
    assert all(case.startswith("ok ") for case in cases)
    assert summary == f"{tier}: {len(cases)} cases, 0 failed"


def test_a_wrong_bit_is_noticed(programs: Path, vectors: Path):
    wrong = vectors.with_name("wrong.bin")
    data = bytearray(vectors.read_bytes())
    data[-4] ^= 1  # the lowest bit of the last float32 that the last case expects
    wrong.write_bytes(data)
    done = run("max", programs / "check_vectors", wrong, "i8mm", "full range")
    assert done.returncode == 1
    assert done.stdout.splitlines()[0].startswith("FAIL  full range")


@pytest.mark.parametrize(("model", "tier"), REFUSED)
def test_a_tier_needs_what_the_probe_asks_for(programs: Path, vectors: Path, model: str, tier: str):
    done = run(model, programs / "check_vectors", vectors, tier)
    assert done.returncode == ILLEGAL_INSTRUCTION, done.stdout + done.stderr


@pytest.mark.parametrize("tier", probe.TIERS)
def test_offsets_beyond_32_bits(programs: Path, tier: str):
    done = run("max", programs / "check_offsets", tier)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "w13 of 4587520000 bytes, 0 of 3 far experts differ, 0 zeros" in done.stdout


@pytest.mark.parametrize("tier", probe.TIERS)
def test_limits_can_be_measured(programs: Path, tier: str):
    done = run("max", programs / "print_limits", tier)
    assert done.returncode == 0, done.stderr
    once, thrice, found = map(int, done.stdout.split())
    assert once > 0
    assert thrice == 3 * once
    assert found == 7


@pytest.mark.parametrize("model", REFUSALS)
def test_probe_on_each_model(programs: Path, model: str):
    done = run(model, programs / "print_facts")
    assert done.returncode == 0, done.stderr
    facts = probe.decode(bytes.fromhex(done.stdout))
    assert {tier: probe.refusal(tier, facts) for tier in probe.TIERS} == REFUSALS[model]


def test_units_hold_their_own_instructions(programs: Path):
    checked = subprocess.run(
        [sys.executable, str(PLUGIN / "checks" / "check_objects.py"), str(programs)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert checked.stdout.startswith("ok: 4 units")
