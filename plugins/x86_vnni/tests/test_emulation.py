"""The emulator that other tests rely on: which instructions a processor has, what they compute, how runs end."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import emulated
import pytest
from emulated import run_emulated

SOURCE = emulated.RUN_EMULATED.with_name("check_instructions.c")
TILES_SOURCE = emulated.RUN_EMULATED.with_name("check_tiles.c")
COMPILERS = ("cc", "gcc", "clang")

# avx2, avx512f, avx512_vnni, avx_vnni
MODELS = {
    "haswell": (1, 0, 0, 0),
    "skylake-x": (1, 1, 0, 0),
    "icelake": (1, 1, 1, 0),
    "sapphirerapids": (1, 1, 1, 1),
    "sapphirerapids-amx": (1, 1, 1, 1),
    "arrowlake": (1, 0, 0, 1),
}
needs_linux_x86 = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64",
    reason=f"the emulator runs on Linux x86-64, this is {sys.platform} {platform.machine()}",
)


def build(source: Path, folder: Path) -> Path:
    if reason := emulated.static_program_refusal(*COMPILERS):
        pytest.skip(reason)
    compiler, _ = emulated.find_compiler(*COMPILERS)
    built = folder / source.stem
    subprocess.run([compiler, "-O2", "-Wall", "-Wextra", "-static", str(source), "-o", str(built)], check=True)
    return built


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(SOURCE, tmp_path_factory.mktemp("check_instructions"))


@pytest.fixture(scope="module")
def tiles_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler, _ = emulated.find_compiler(*COMPILERS)
    probe = "#include <immintrin.h>\nint main(void) { _tile_release(); return 0; }"
    flags = ("-mamx-tile", "-mamx-int8", "-x", "c", "-", "-o", os.devnull)
    if (
        compiler
        and subprocess.run([compiler, *flags], input=probe, text=True, capture_output=True, check=False).returncode
    ):
        pytest.skip(f"{compiler} and its assembler have no AMX")
    return build(TILES_SOURCE, tmp_path_factory.mktemp("check_tiles"))


@pytest.mark.parametrize("model", MODELS)
def test_cpuid_describes_the_model(program: Path, model: str):
    names = ("avx2", "avx512f", "avx512_vnni", "avx_vnni")
    expected = " ".join(f"{name}={bit}" for name, bit in zip(names, MODELS[model], strict=True))
    run = run_emulated(program, "cpuid", model=model, timeout=60)
    assert (run.returncode, run.stdout, run.stderr) == (0, expected + "\n", "")


@pytest.mark.parametrize("form", ["zmm", "vex"])
@pytest.mark.parametrize("model", MODELS)
def test_vpdpbusd_is_right_where_it_exists_and_illegal_elsewhere(program: Path, model: str, form: str):
    _, _, avx512_vnni, avx_vnni = MODELS[model]
    run = run_emulated(program, form, model=model, timeout=60)
    if avx512_vnni if form == "zmm" else avx_vnni:
        assert (run.returncode, run.stdout, run.stderr) == (0, "1000 rounds equal\n", "")
    else:
        assert (run.returncode, run.stdout) == (emulated.ILLEGAL_INSTRUCTION, "")
        assert "illegal instruction" in run.stderr


@pytest.mark.parametrize(
    ("what", "said"), [("products", "200 rounds equal"), ("addresses", "addresses equal"), ("state", "state equal")]
)
def test_amx_is_right(tiles_program: Path, what: str, said: str):
    run = run_emulated(tiles_program, what, model="sapphirerapids-amx", timeout=60)
    assert (run.returncode, run.stdout, run.stderr) == (0, said + "\n", "")


def test_amx_is_illegal_without_it(tiles_program: Path):
    run = run_emulated(tiles_program, "products", model="sapphirerapids", timeout=60)
    assert (run.returncode, run.stdout) == (emulated.ILLEGAL_INSTRUCTION, "")


@pytest.mark.parametrize(
    ("what", "status", "message"),
    [
        ("palette", emulated.SEGMENTATION_FAULT, "the palette is not 0 or 1"),
        ("reserved", emulated.SEGMENTATION_FAULT, "a reserved byte is not 0"),
        ("wide", emulated.SEGMENTATION_FAULT, "more than 64 bytes"),
        ("half", emulated.SEGMENTATION_FAULT, "rows without bytes"),
        ("unconfigured", emulated.ILLEGAL_INSTRUCTION, "tile 1 is not configured"),
        ("mismatch", emulated.ILLEGAL_INSTRUCTION, "tiles 0, 5 and 2 do not fit together"),
        ("same", emulated.ILLEGAL_INSTRUCTION, "tiles 0, 1 and 1 do not fit together"),
        ("unmapped", emulated.SEGMENTATION_FAULT, "page fault for address 0x8"),
        ("constant", emulated.SEGMENTATION_FAULT, "page fault for address"),
    ],
)
def test_wrong_use_of_amx_ends_the_run(tiles_program: Path, what: str, status: int, message: str):
    run = run_emulated(tiles_program, what, model="sapphirerapids-amx", timeout=60)
    assert (run.returncode, run.stdout) == (status, "")
    assert message in run.stderr


@pytest.mark.parametrize("model", ["sapphirerapids", "sapphirerapids-amx"])
def test_an_unknown_instruction_is_illegal_on_every_model(program: Path, model: str):
    run = run_emulated(program, "undefined", model=model, timeout=60)
    assert (run.returncode, run.stdout) == (emulated.ILLEGAL_INSTRUCTION, "")
    assert "illegal instruction" in run.stderr


def test_files_memory_and_status_pass_through(program: Path, tmp_path: Path):
    data = bytes(range(256)) * 4000  # large enough to be mapped rather than on the heap
    file = tmp_path / "a file"
    file.write_bytes(data)
    run = run_emulated(program, "sum", file, timeout=60)
    assert (run.returncode, run.stdout, run.stderr) == (0, f"{len(data)} bytes, sum {sum(data)}\n", "")
    missing = run_emulated(program, "sum", tmp_path / "missing", timeout=60)
    assert missing.returncode == 1
    assert "No such file" in missing.stderr
    assert run_emulated(program, "status", "37", timeout=60).returncode == 37


@pytest.mark.parametrize(
    ("what", "status", "message"),
    [
        ("null", emulated.SEGMENTATION_FAULT, "page fault"),
        ("constant", emulated.SEGMENTATION_FAULT, "page fault"),
        ("abort", emulated.ABORTED, "raised signal 6"),
    ],
)
def test_faults_end_the_run_as_in_a_shell(program: Path, what: str, status: int, message: str):
    run = run_emulated(program, what, timeout=60)
    assert run.returncode == status
    assert message in run.stderr


def test_time_limit(program: Path):
    run = run_emulated(program, "spin", timeout=0.5)
    assert (run.returncode, run.stderr) == (emulated.TIME_LIMIT, "run_emulated: stopped after 0.5 s\n")


def test_what_is_no_static_program_is_refused(program: Path, tmp_path: Path):
    text = tmp_path / "text"
    text.write_text("no program " * 20)
    assert run_emulated(text).returncode == emulated.NOT_LOADABLE
    assert run_emulated(tmp_path / "missing").returncode == emulated.NOT_FOUND
    dynamic = tmp_path / "dynamic"
    compiler, _ = emulated.find_compiler(*COMPILERS)
    subprocess.run([compiler, str(SOURCE), "-o", str(dynamic)], check=True)
    run = run_emulated(dynamic)
    assert run.returncode == emulated.NOT_LOADABLE
    assert "link it with -static" in run.stderr


@needs_linux_x86
def test_without_the_wheel_one_line_says_what_to_install():
    command = [sys.executable, "-E", "-S", str(emulated.RUN_EMULATED), "--check"]  # -S: no site-packages
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    expected = "run_emulated: bochscpu-python is not installed: pip install bochscpu-python==0.4.0\n"
    assert (run.returncode, run.stdout, run.stderr) == (emulated.EMULATOR_FAILED, "", expected)
