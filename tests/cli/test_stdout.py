"""Stdout carries the data of the command and nothing else, whatever plugins and their libraries print."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from plugin_folder import PluginFolder

from .conftest import EXPERTS_IN_TROUBLE, Command

CONFIG = json.dumps({"num_experts": 8, "top_k": 2, "hidden_size": 64, "intermediate_size": 32})

# Each way in which code of a plugin may come to print; "libc" is a buffer that is written out at exit.
WAYS = {
    "print": "print('NOISE')",
    "the first stdout": "import sys; sys.__stdout__.write('NOISE\\n'); sys.__stdout__.flush()",
    "fd 1": "import os; os.write(1, b'NOISE\\n')",
    "libc": "import ctypes; ctypes.CDLL(None).puts(b'NOISE')",
    "a child": "import subprocess; subprocess.run(['echo', 'NOISE'])",
    "at exit": "import atexit; atexit.register(print, 'NOISE')",
    "click": "import click; click.echo('NOISE')",
}


@pytest.fixture(params=WAYS)
def noisy(request: pytest.FixtureRequest, plugins: PluginFolder) -> Path:
    """A plugin that prints at import, in its provider's hook, at its kernel's import and in the kernel's hooks."""
    if request.param == "libc" and os.name != "posix":
        pytest.skip("no libc to load")
    noise = WAYS[request.param]
    plugins.add_good()
    provider = plugins.folder / "acme_plugin.py"
    text = provider.read_text().replace("def register_kernels():", f"def register_kernels():\n    {noise}")
    provider.write_text(f"from __future__ import annotations\n{noise}\n{text}")
    experts = plugins.folder / "acme_plugin_experts.py"
    experts.write_text(f"{noise}\n" + EXPERTS_IN_TROUBLE.format(apply=noise, pack=noise))
    return plugins.folder


def documents(int8moe: Command, site: Path, *arguments: str) -> Any:
    """The document, once it is known that something was printed, and where."""
    done = int8moe(*arguments, "--json", site=site)
    assert done.returncode == 0, done.stderr
    assert "NOISE" in done.stderr
    return json.loads(done.stdout)


def test_list_kernels(int8moe: Command, noisy: Path) -> None:
    document = documents(int8moe, noisy, "list-kernels", "--check")
    assert {row["name"]: row["check"] for row in document["kernels"]}["acme.fast"] == "ok"


def test_explain(int8moe: Command, noisy: Path) -> None:
    assert documents(int8moe, noisy, "explain", "--config", CONFIG, "--kernel", "acme.fast")["chosen"] == "acme.fast"


def test_run(int8moe: Command, noisy: Path) -> None:
    assert documents(int8moe, noisy, "run", "--kernel", "acme.fast", "--tokens", "2")["passed"]


def test_verify(int8moe: Command, noisy: Path) -> None:
    assert documents(int8moe, noisy, "verify", "acme.fast", "--quick", "--group", "refusals")["passed"]


def test_bench(int8moe: Command, noisy: Path) -> None:
    arguments = ("--shape", "4,2,32,16", "--tokens", "1", "--gigabytes", "1e-6", "--seconds", "0", "--rounds", "7")
    document = documents(int8moe, noisy, "bench", *arguments, "--kernel", "acme.fast")
    assert [kernel["kernel"] for kernel in document["kernels"]] == ["acme.fast"]


def test_tables(int8moe: Command, noisy: Path) -> None:
    done = int8moe("list-kernels", site=noisy)
    assert done.returncode == 0
    assert "NOISE" not in done.stdout
    assert "acme.fast" in done.stdout


def test_closed_pipe_of_a_noisy_plugin_is_no_error(int8moe: Command, noisy: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = int8moe("list-kernels", site=noisy, stdout=writer)
    finally:
        os.close(writer)
    assert done.returncode == 0
    assert set(done.stderr.split()) == {"NOISE"}
