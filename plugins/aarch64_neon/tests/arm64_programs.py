"""Programs for AArch64: cross-compiled by the plugin's CMakeLists.txt, and run by QEMU's user mode on models of CPUs."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

PLUGIN = Path(__file__).resolve().parent.parent
NATIVE = PLUGIN.parent / "x86_vnni" / "tests" / "native"  # its vectors and their checker know no instruction set
COMPILERS = ("aarch64-linux-gnu-gcc", "aarch64-linux-gnu-g++")
EMULATORS = ("qemu-aarch64-static", "qemu-aarch64")
ILLEGAL_INSTRUCTION = -signal.SIGILL

NO_DOTPROD = "the CPU has no int8 dot products (FEAT_DotProd)"
NO_I8MM = "the CPU has no int8 matrix multiplication (FEAT_I8MM)"
# Why each tier is refused on each model.
REFUSALS: dict[str, dict[str, str | None]] = {
    "cortex-a72": {"neon": None, "dotprod": NO_DOTPROD, "i8mm": NO_I8MM},
    "cortex-a76": {"neon": None, "dotprod": None, "i8mm": NO_I8MM},
    "neoverse-n1": {"neon": None, "dotprod": None, "i8mm": NO_I8MM},
    "max,sve=off": {"neon": None, "dotprod": None, "i8mm": None},
    "max": {"neon": None, "dotprod": None, "i8mm": None},
}


def _find(*names: str) -> str | None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return next(filter(None, (shutil.which(name, path=path) for name in names)), None)


def refusal() -> str | None:
    """Why no program can be built and run here; None when it can."""
    if not NATIVE.is_dir():
        return f"{NATIVE} is missing: the emulated tests need the checkout"
    for names in ((COMPILERS[0],), (COMPILERS[1],), EMULATORS, ("cmake",)):
        if _find(*names) is None:
            return f"{' or '.join(names)} is not installed"
    return None


def build(folder: Path) -> None:
    """Build the programs of CMakeLists.txt's INT8MOE_BUILD_CHECKS, statically linked, in ``folder``."""
    cmake = _find("cmake")
    assert cmake is not None
    options = {
        "CMAKE_SYSTEM_NAME": "Linux",
        "CMAKE_SYSTEM_PROCESSOR": "aarch64",
        "CMAKE_C_COMPILER": COMPILERS[0],
        "CMAKE_CXX_COMPILER": COMPILERS[1],
        "INT8MOE_BUILD_CHECKS": "ON",
    }
    configure = [cmake, "-S", PLUGIN, "-B", folder, *(f"-D{name}={value}" for name, value in options.items())]
    for command in (configure, [cmake, "--build", folder, "--parallel", "2"]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def run(model: str, program: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a statically linked program on a model of a CPU; its signals become negative return codes."""
    emulator = _find(*EMULATORS)
    assert emulator is not None
    command = [emulator, "-cpu", model, str(program), *map(str, arguments)]
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=300, check=False
    )
