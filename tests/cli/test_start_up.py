"""The command starts fast, and imports only what a verb needs."""

from __future__ import annotations

import json
import resource
import subprocess
import sys

import pytest

from .conftest import COMMAND, Command

CPU_SECONDS = 0.3


def cpu_seconds(command: list[str], environment: dict[str, str]) -> float:
    """User and system time of the best of 5 runs; of more when the machine is busy and none was good enough."""
    best = float("inf")
    for attempt in range(150):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        if attempt >= 4 and best < CPU_SECONDS:
            break
    return best


@pytest.mark.alone
@pytest.mark.parametrize("arguments", [["--help"], ["list-kernels"], ["list-kernels", "--json"]], ids=" ".join)
def test_cpu_time(int8moe: Command, arguments: list[str]) -> None:
    assert cpu_seconds([*COMMAND, *arguments], int8moe.environment()) < CPU_SECONDS


def imported(int8moe: Command, *arguments: str) -> set[str]:
    """Top-level modules after a command line."""
    code = f"""
import json, sys
from int8moe.cli.app import run
status = run({list(arguments)!r})
print(json.dumps([status, sorted({{name.partition('.')[0] for name in sys.modules}})]), file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=int8moe.environment(), capture_output=True, text=True, check=True
    )
    status, names = json.loads(done.stderr.splitlines()[-1])
    assert status == 0
    return set(names)


@pytest.mark.parametrize(
    "arguments",
    [["--help"], *([verb, "--help"] for verb in ("run", "verify", "explain", "bench", "doctor", "generate", "eval"))],
)
def test_help_imports_neither_torch_nor_pydantic(int8moe: Command, arguments: list[str]) -> None:
    assert not {"torch", "pydantic", "rich", "pluggy", "safetensors"} & imported(int8moe, *arguments)


def test_list_kernels_imports_no_torch(int8moe: Command) -> None:
    assert not {"torch", "rich", "safetensors"} & imported(int8moe, "list-kernels")


def test_import_of_the_package_imports_nothing(int8moe: Command) -> None:
    code = "import sys, int8moe.cli; assert not {'click', 'pydantic', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], env=int8moe.environment(), check=True)
