"""The native tiers on emulated processors: the reference's bits, and what the probe says, where no such machine is.

The program is check_vectors, statically linked, compiled with the options that CMakeLists.txt gives each unit.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import emulated
import pytest
from emulated import run_emulated
from native_build import COMPILERS, NATIVE, Build

from int8moe_x86_vnni import probe

PRINT_PROBE = """
#include <stdio.h>
#include "dispatcher.h"
int main() {
  int8moe_x86_facts facts = {};
  facts.struct_bytes = sizeof facts;
  if (int8moe_x86_probe(&facts, 1) != INT8MOE_OK) return 1;
  for (unsigned long i = 0; i < sizeof facts; ++i) printf("%02x", reinterpret_cast<unsigned char*>(&facts)[i]);
  return 0;
}
"""

# Products of 1 and 3 rounds of the fastest loop, and what reading a buffer with one odd byte finds.
PRINT_LIMITS = """
#include <stdio.h>
#include <string.h>
#include <int8moe/abi.h>
static unsigned char buffer[1000];
int main(int, char** argv) {
  int tier = 0;
  while (strcmp(int8moe_tier_name(tier), argv[1]) != 0) ++tier;
  buffer[999] = 7;
  const long long once = int8moe_run_peak(tier, 1, 1), thrice = int8moe_run_peak(tier, 1, 3);
  printf("%lld %lld %d\\n", once, thrice, int8moe_read_memory(tier, 1, buffer, sizeof buffer));
  return 0;
}
"""

NO_AVX512 = "the CPU has no AVX512F/BW/VL"
NO_VNNI = "the CPU has no AVX512-VNNI"
NO_AVX_VNNI = "the CPU has no AVX-VNNI"
NO_AMX = "the CPU has no AMX-INT8"
# Why each tier is refused on each processor.
REFUSALS = {
    "haswell": {"avx2": None, "avx_vnni": NO_AVX_VNNI, "avx512_vnni": NO_AVX512, "amx_int8": NO_AMX},
    "skylake-x": {"avx2": None, "avx_vnni": NO_AVX_VNNI, "avx512_vnni": NO_VNNI, "amx_int8": NO_AMX},
    "icelake": {"avx2": None, "avx_vnni": NO_AVX_VNNI, "avx512_vnni": None, "amx_int8": NO_AMX},
    "sapphirerapids": {"avx2": None, "avx_vnni": None, "avx512_vnni": None, "amx_int8": NO_AMX},
    # Its CPUID is that of the model above: Bochs has no AMX to describe. test_probe.py has the facts of one that does.
    "sapphirerapids-amx": {"avx2": None, "avx_vnni": None, "avx512_vnni": None, "amx_int8": NO_AMX},
    "arrowlake": {"avx2": None, "avx_vnni": None, "avx512_vnni": NO_AVX512, "amx_int8": NO_AMX},
}


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    if reason := emulated.static_program_refusal(*COMPILERS):
        pytest.skip(reason)
    compiler, _ = emulated.find_compiler(*COMPILERS)
    return Build(compiler, tmp_path_factory.mktemp("emulated_tiers"))


@pytest.fixture(scope="module")
def check_vectors(build: Build) -> Path:
    return build.program(NATIVE / "check_vectors.cpp")


@pytest.fixture(scope="module")
def vectors(build: Build) -> Path:
    path = build.folder / "vectors.bin"
    subprocess.run([sys.executable, str(NATIVE / "write_vectors.py"), str(path)], check=True)
    return path


@pytest.fixture(scope="module")
def print_probe(build: Build) -> Path:
    source = build.folder / "print_probe.cpp"
    source.write_text(PRINT_PROBE)
    return build.program(source)


@pytest.fixture(scope="module")
def print_limits(build: Build) -> Path:
    source = build.folder / "print_limits.cpp"
    source.write_text(PRINT_LIMITS)
    return build.program(source)


@pytest.mark.parametrize(
    ("model", "tier"),
    [
        ("haswell", "avx2"),
        ("icelake", "avx2"),
        ("arrowlake", "avx_vnni"),
        ("sapphirerapids", "avx_vnni"),
        ("icelake", "avx512_vnni"),
        ("sapphirerapids", "avx512_vnni"),
        ("sapphirerapids-amx", "amx_int8"),
    ],
)
def test_every_vector_has_the_bits_of_the_reference(
    build: Build, check_vectors: Path, vectors: Path, model: str, tier: str
):
    build.require(tier)
    run = run_emulated(check_vectors, vectors, tier, model=model)
    assert run.returncode == 0, run.stdout + run.stderr
    *cases, summary = run.stdout.splitlines()
    assert len(cases) > 90
    assert all(case.startswith("ok ") for case in cases)
    assert summary == f"{tier}: {len(cases)} cases, 0 failed"


def test_a_wrong_bit_is_noticed(check_vectors: Path, vectors: Path):
    wrong = vectors.with_name("wrong.bin")
    data = bytearray(vectors.read_bytes())
    data[-4] ^= 1  # the lowest bit of the last float32 that the last case expects
    wrong.write_bytes(data)
    run = run_emulated(check_vectors, wrong, "avx512_vnni", "full range")
    assert run.returncode == 1
    assert run.stdout.splitlines()[0].startswith("FAIL  full range")


@pytest.mark.parametrize(
    ("model", "tier"),
    [
        ("haswell", "avx_vnni"),
        ("icelake", "avx_vnni"),
        ("haswell", "avx512_vnni"),
        ("skylake-x", "avx512_vnni"),
        ("arrowlake", "avx512_vnni"),
        ("sapphirerapids", "amx_int8"),
    ],
)
def test_a_tier_needs_what_the_probe_asks_for(build: Build, check_vectors: Path, vectors: Path, model: str, tier: str):
    build.require(tier)
    assert REFUSALS[model][tier] is not None
    run = run_emulated(check_vectors, vectors, tier, model=model)
    assert run.returncode == emulated.ILLEGAL_INSTRUCTION


def test_amx_is_left_alone_where_an_expert_has_few_rows(build: Build, check_vectors: Path, vectors: Path):
    """On a processor without it: up to three rows there is no tile instruction at all, with four there is."""
    build.require("amx_int8")
    few = run_emulated(check_vectors, vectors, "amx_int8", "one expert, 3 rows", model="sapphirerapids")
    assert few.returncode == 0, few.stdout + few.stderr
    assert few.stdout.count("ok ") == 2
    more = run_emulated(check_vectors, vectors, "amx_int8", "one expert, 4 rows", model="sapphirerapids")
    assert more.returncode == emulated.ILLEGAL_INSTRUCTION


@pytest.mark.parametrize(
    ("model", "tier"),
    [("haswell", "avx2"), ("arrowlake", "avx_vnni"), ("icelake", "avx512_vnni"), ("sapphirerapids-amx", "amx_int8")],
)
def test_limits_can_be_measured(build: Build, print_limits: Path, model: str, tier: str):
    build.require(tier)
    run = run_emulated(print_limits, tier, model=model, timeout=60)
    assert run.returncode == 0, run.stderr
    once, thrice, found = map(int, run.stdout.split())
    assert once > 0
    assert thrice == 3 * once
    assert found == 7


@pytest.mark.parametrize("model", REFUSALS)
def test_probe_on_each_model(print_probe: Path, model: str):
    run = run_emulated(print_probe, model=model, timeout=60)
    assert run.returncode == 0, run.stderr
    facts = probe.decode(bytes.fromhex(run.stdout))
    assert {tier: probe.refusal(tier, facts) for tier in probe.TIERS} == REFUSALS[model]
