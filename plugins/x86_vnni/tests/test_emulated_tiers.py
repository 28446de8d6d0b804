"""The native tiers on emulated processors: the reference's bits, and what the probe says, where no such machine is.

The program is check_vectors, statically linked, compiled with the options that CMakeLists.txt gives each unit.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import emulated
import pytest
from emulated import run_emulated

from int8moe_x86_vnni import probe

PLUGIN = Path(__file__).parent.parent
NATIVE = PLUGIN / "tests" / "native"
HEADERS = (PLUGIN / "../../src/int8moe/include", PLUGIN / "include")  # the checkout's, the sdist's
COMPILERS = ("c++", "g++", "clang++")
# What CMake adds to the options by itself, for the properties of the target and a release build.
CMAKE_OPTIONS = ("-std=c++17", "-fPIC", "-fvisibility=hidden", "-DNDEBUG")

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
    "arrowlake": {"avx2": None, "avx_vnni": None, "avx512_vnni": NO_AVX512, "amx_int8": NO_AMX},
}


class Build:
    """The plugin's units, compiled once; programs are linked with them."""

    def __init__(self, compiler: str, folder: Path) -> None:
        self.compiler, self.folder = compiler, folder
        recipe = (PLUGIN / "CMakeLists.txt").read_text()
        sources = self._find(r"add_library\(int8moe_objects OBJECT ([^)]*)\)", recipe).split()
        common = self._find(r"target_compile_options\(int8moe_objects PRIVATE\s([^)]*)\)", recipe).split()
        own = dict(re.findall(r'set_source_files_properties\((\S+) PROPERTIES COMPILE_OPTIONS\s+"(.*?)"\)', recipe))
        self.objects = [self.compile(PLUGIN / name, *common, *own.get(name, "").split(";")) for name in sources]

    @staticmethod
    def _find(pattern: str, text: str) -> str:
        match = re.search(pattern, text)
        assert match, f"CMakeLists.txt has no {pattern}: change this test with it"
        return match[1]

    def compile(self, source: Path, *options: str) -> Path:
        headers = next(folder for folder in HEADERS if (folder / "int8moe" / "abi.h").exists())
        built = self.folder / f"{source.stem}.o"
        include = ("-I", str(headers), "-I", str(PLUGIN / "csrc"))
        files = ("-c", str(source), "-o", str(built))
        subprocess.run([self.compiler, *CMAKE_OPTIONS, *filter(None, options), *include, *files], check=True)
        return built

    def program(self, source: Path) -> Path:
        built = self.folder / source.stem
        objects = [self.compile(source, "-O1", "-fno-exceptions", "-fno-rtti"), *self.objects]
        subprocess.run([self.compiler, "-static", *map(str, objects), "-o", str(built)], check=True)
        return built


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


@pytest.mark.parametrize(
    ("model", "tier"),
    [("haswell", "avx2"), ("icelake", "avx2"), ("icelake", "avx512_vnni"), ("sapphirerapids", "avx512_vnni")],
)
def test_every_vector_has_the_bits_of_the_reference(check_vectors: Path, vectors: Path, model: str, tier: str):
    run = run_emulated(check_vectors, vectors, tier, model=model)
    assert run.returncode == 0, run.stdout + run.stderr
    *cases, summary = run.stdout.splitlines()
    assert len(cases) > 50
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


@pytest.mark.parametrize(("model", "tier"), [("haswell", "avx512_vnni"), ("skylake-x", "avx512_vnni")])
def test_a_tier_needs_what_the_probe_asks_for(check_vectors: Path, vectors: Path, model: str, tier: str):
    assert REFUSALS[model][tier] is not None
    run = run_emulated(check_vectors, vectors, tier, model=model)
    assert run.returncode == emulated.ILLEGAL_INSTRUCTION


@pytest.mark.parametrize("model", REFUSALS)
def test_probe_on_each_model(print_probe: Path, model: str):
    run = run_emulated(print_probe, model=model, timeout=60)
    assert run.returncode == 0, run.stderr
    facts = probe.decode(bytes.fromhex(run.stdout))
    assert {tier: probe.refusal(tier, facts) for tier in probe.TIERS} == REFUSALS[model]
