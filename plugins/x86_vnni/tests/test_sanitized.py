"""The native code under AddressSanitizer and UndefinedBehaviorSanitizer, over the reference's vectors."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from native_build import COMPILERS, NATIVE, Build
from native_tiers import KERNELS, why_not

SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def refusal(compiler: str, folder: Path) -> str | None:
    command = [compiler, *SANITIZERS, "-x", "c++", "-", "-o", str(folder / "empty")]
    built = subprocess.run(command, input="int main() {}", text=True, capture_output=True, check=False)
    return f"{compiler} has no sanitizers here: {built.stderr.strip()}" if built.returncode else None


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        pytest.skip(f"none of these compilers is installed: {', '.join(COMPILERS)}")
    folder = tmp_path_factory.mktemp("sanitized")
    if reason := refusal(compiler, folder):
        pytest.skip(reason)
    # -O2: at -O0 intrinsics are calls, and every other unit of this project is optimised, too.
    tiers = [tier for tier in KERNELS if why_not(tier) is None]
    if not tiers:
        pytest.skip("no tier can run here")
    return Build(compiler, folder, tiers=tiers, link=SANITIZERS, extra=("-O2", "-g", *SANITIZERS)).program(
        NATIVE / "check_vectors.cpp"
    )


@pytest.fixture(scope="module")
def vectors(program: Path) -> Path:
    path = program.with_name("vectors.bin")
    subprocess.run([sys.executable, str(NATIVE / "write_vectors.py"), str(path)], check=True)
    return path


def test_no_error_on_any_vector(program: Path, vectors: Path, tier: str):
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=1"}
    run = subprocess.run(
        [str(program), str(vectors), tier], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "0 failed" in run.stdout
    assert not run.stderr


def test_the_sanitizers_are_on(program: Path, vectors: Path, tier: str):
    """Vectors that end early are read no further than they go: the program says so, and no sanitizer has to."""
    cut = vectors.with_name("cut.bin")
    cut.write_bytes(vectors.read_bytes()[:1000])
    run = subprocess.run([str(program), str(cut), tier], capture_output=True, text=True, check=False)
    assert run.returncode != 0
    assert "Sanitizer" not in run.stderr
    assert b"__asan_init" in program.read_bytes()
