"""The driver's headers: each stands alone, and their constants are the core's."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import int8moe
from int8moe.contracts import ACTIVATIONS, MAX_REDUCTION, NUMERICS_VERSION
from int8moe.native import abi

INCLUDE = Path(int8moe.get_include())
HEADERS = sorted(path.name for path in (INCLUDE / "int8moe").glob("*.h"))
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler on the PATH")
@pytest.mark.parametrize("header", [name for name in HEADERS if name != "library.h"])  # that one wants its dispatcher
def test_a_header_stands_alone(header: str) -> None:
    assert COMPILER is not None
    flags = ["-std=c++17", "-fsyntax-only", "-ffp-contract=off", "-DINT8MOE_LANES=4", f"-I{INCLUDE}", "-x", "c++", "-"]
    done = subprocess.run(
        [COMPILER, *flags], input=f"#include <int8moe/{header}>\n", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_constants_are_the_core_s() -> None:
    text = (INCLUDE / "int8moe" / "abi.h").read_text()

    def constant(name: str) -> int:
        found = re.search(rf"{name}\s*=?\s*(\d+)", text)
        assert found is not None, f"abi.h has no {name}"
        return int(found[1])

    assert constant("INT8MOE_DRIVER_VERSION") == abi.DRIVER_VERSION
    assert constant("INT8MOE_NUMERICS_VERSION") == NUMERICS_VERSION
    assert constant("INT8MOE_MAX_REDUCTION") == MAX_REDUCTION
    order = re.findall(r"INT8MOE_(\w+)", text[text.index("INT8MOE_SILU") :])
    assert tuple(name.lower() for name in order[: len(ACTIVATIONS)]) == ACTIVATIONS
