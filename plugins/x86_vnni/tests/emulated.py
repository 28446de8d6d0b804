"""Run programs on an emulated processor from tests, and build programs that can be; see emulation/run_emulated.py."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

RUN_EMULATED = Path(__file__).parent / "emulation" / "run_emulated.py"
TIME_LIMIT, EMULATOR_FAILED, NOT_LOADABLE, NOT_FOUND = 124, 125, 126, 127
ILLEGAL_INSTRUCTION, ABORTED, SEGMENTATION_FAULT = 132, 134, 139  # 128 + the signal

_GRACE = 60.0  # seconds that the emulator has to end by itself after its time limit


@functools.cache
def _shim_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="int8moe-emulation-")  # removed when the tests end


def _run_script(*arguments: str, timeout: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(RUN_EMULATED), "--shim-folder", _shim_folder().name, *arguments]
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=timeout
    )


def run_emulated(
    program: Path, *args: str | Path, model: str = "icelake", timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run a statically linked program; see above for what its return code can be besides the program's own.

    Args:
        program: the program.
        *args: its arguments.
        model: haswell, skylake-x, icelake, sapphirerapids, sapphirerapids-amx or arrowlake.
        timeout: seconds after which it is stopped, with TIME_LIMIT.
    """
    options = ("--model", model, "--time-limit", str(timeout))
    return _run_script(*options, str(program), *map(str, args), timeout=timeout + _GRACE)


@functools.cache
def emulator_refusal() -> str | None:
    """Why no program can be emulated here; None when it can."""
    checked = _run_script("--check", timeout=_GRACE)
    return None if checked.returncode == 0 else checked.stderr.strip().removeprefix("run_emulated: ")


@functools.cache
def find_compiler(*names: str) -> tuple[str, str | None]:
    """The first of these compilers that is here, and why it cannot link static programs; None when it can."""
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        return "", f"none of these compilers is installed: {', '.join(names)}"
    with tempfile.TemporaryDirectory() as folder:
        command = [found, "-static", "-x", "c", "-", "-lm", "-o", str(Path(folder) / "empty")]
        linked = subprocess.run(
            command, input="int main(void) { return 0; }", capture_output=True, text=True, check=False
        )
    reason = f"{found} cannot link a static program: {linked.stderr.strip()}" if linked.returncode else None
    return found, reason


def static_program_refusal(*compilers: str) -> str | None:
    """Why no program can be built with one of these compilers and run emulated here; None when it can."""
    return emulator_refusal() or find_compiler(*compilers)[1]
