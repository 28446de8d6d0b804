"""Exit codes, stdout and stderr, pipes and interrupts: what holds for every verb."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import COMMAND, Command

CONFIG = {"num_experts": 8, "top_k": 2, "hidden_size": 64, "intermediate_size": 32}
VERBS = ("list-kernels", "explain", "verify", "run", "generate", "eval", "bench", "doctor", "tune", "new-plugin")


def test_help_lists_the_verbs(int8moe: Command) -> None:
    done = int8moe("--help")
    assert done.returncode == 0
    assert done.stderr == ""
    for verb in VERBS:
        assert f"\n  {verb} " in done.stdout


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_and_json(int8moe: Command, verb: str) -> None:
    done = int8moe(verb, "--help")
    assert done.returncode == 0
    assert "--json" in done.stdout


def test_version(int8moe: Command) -> None:
    done = int8moe("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("int8moe ")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "Missing command"),
        (["list-kernel"], "did you mean list-kernels?"),
        (["zzz"], "verbs are list-kernels"),
        (["--nope"], "--nope"),
        (["list-kernels", "--nope"], "int8moe list-kernels --help"),
        (["list-kernels", "extra"], "extra"),
        (["explain"], "--config or --checkpoint"),
        (["explain", "--config", "{"], "is not JSON"),
        (["explain", "--config", "[1]"], "object"),
        (["verify"], "KERNEL"),
        (["run", "--layers", "0,x"], "'x'"),
        (["run", "--layers", "0-999999999"], "layer number"),
        (["run", "--tokens", "0"], "--tokens"),
        (["doctor", "--time-limit", "0"], "--time-limit"),
        (["doctor", "--time-limit", "nan"], "not a finite number"),
        (["doctor", "--time-limit", "inf"], "not a finite number"),
        (["bench", "extra"], "extra"),
        (["bench", "--seconds", "nan"], "not a finite number"),
        (["bench", "--gigabytes", "nan"], "not a finite number"),
        (["generate", "."], "--prompt"),
        (["generate", ".", "--prompt", "x", "--temperature", "nan"], "not a finite number"),
        (["generate", ".", "--prompt", "x", "--temperature", "inf"], "--temperature"),
        (["generate", ".", "--prompt", "x", "--temperature", "-inf"], "--temperature"),
        (["generate", ".", "--prompt", "x", "--temperature", "1e-40"], "below 0.01; give 0"),
        (["generate", ".", "--prompt", "x", "--temperature", "0.0099"], "below 0.01; give 0"),
        (["eval", ".", "absent.txt"], "absent.txt"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_is_one_line_and_exit_2(int8moe: Command, arguments: list[str], text: str) -> None:
    assert text in int8moe.error(*arguments, status=2)


def test_ways_to_start_it(int8moe: Command, repository: Path) -> None:
    for module in ("int8moe", "int8moe.cli"):
        for arguments, status in ((["--version"], 0), (["zzz"], 2)):
            done = subprocess.run(
                [sys.executable, "-m", module, *arguments],
                cwd=int8moe.folder,
                env=int8moe.environment(),
                capture_output=True,
                text=True,
                check=False,
            )
            expected = int8moe(*arguments)
            assert done.returncode == expected.returncode == status
            assert (done.stdout, done.stderr) == (expected.stdout, expected.stderr)
    assert 'int8moe = "int8moe.cli:main"' in (repository / "pyproject.toml").read_text()


def test_error_is_one_line_and_debug_shows_where(int8moe: Command) -> None:
    arguments = ("explain", "--config", "@/does/not/exist.json")
    assert int8moe.error(*arguments) == "/does/not/exist.json: No such file or directory"
    done = int8moe(*arguments, INT8MOE_LOG="debug")
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_bad_log_level_is_an_error(int8moe: Command) -> None:
    assert "INT8MOE_LOG" in int8moe.error("list-kernels", INT8MOE_LOG="loud")


def test_unknown_variable_is_a_warning_on_stderr(int8moe: Command) -> None:
    done = int8moe("list-kernels", INT8MOE_KERNELS="x")
    assert done.returncode == 0
    assert done.stderr.startswith("int8moe: warning: INT8MOE_KERNELS")
    assert "INT8MOE_KERNELS" not in done.stdout


@pytest.mark.parametrize("arguments", [["list-kernels"], ["list-kernels", "--json"], ["--help"], ["--version"]])
def test_closed_pipe_is_quiet(int8moe: Command, arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = int8moe(*arguments, stdout=writer)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


CLOSED = [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"]


@pytest.mark.parametrize("closed", CLOSED)
@pytest.mark.parametrize(
    ("arguments", "status"),
    [("list-kernels", 0), ("list-kernels --json", 0), ("list-kernels --check", 0), ("--help", 0), ("--version", 0),
     ("zzz", 2), ("explain --config @/does/not/exist", 1)],
)  # fmt: skip
def test_closed_streams_are_quiet(int8moe: Command, arguments: str, status: int, closed: str) -> None:
    """Only what belongs on the stream that is open appears, and what is on none changes no exit code."""
    done = subprocess.run(
        ["bash", "-c", f'"$@" {arguments} {closed}', "bash", *COMMAND],
        env=int8moe.environment(),
        cwd=int8moe.folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status
    whole = int8moe(*arguments.split())
    assert done.stdout == ("" if ">&-" in closed.split() else whole.stdout)
    assert done.stderr == ("" if "2>&-" in closed.split() else whole.stderr)


@pytest.mark.parametrize(
    "arguments",
    [["list-kernels"], ["explain"], ["verify", "reference.torch"], ["run"], ["bench", "--kernel", "reference.torch"]],
    ids=" ".join,
)
def test_a_plugin_that_is_asked_for_and_absent_is_one_line(int8moe: Command, arguments: list[str]) -> None:
    if arguments == ["explain"]:
        arguments = ["explain", "--config", json.dumps(CONFIG), "--kernel", "reference.torch"]
    if arguments == ["run"]:
        arguments = ["run", "--kernel", "reference.torch"]
    text = int8moe.error(*arguments, INT8MOE_PLUGINS="referense")
    assert text.startswith(
        "INT8MOE_PLUGINS names 'referense', which is not installed; did you mean reference? installed:"
    )


def test_piped_to_head(int8moe: Command) -> None:
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", '"$@" list-kernels | head -1', "bash", *COMMAND],
        env=int8moe.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split()[:2] == ["kernel", "priority"]


def test_full_disk_is_an_error(int8moe: Command) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    with full.open("w") as stream:
        done = int8moe("list-kernels", stdout=stream)
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["int8moe: error: No space left on device"]


def test_names_that_the_terminal_cannot_show(int8moe: Command, tmp_path: Path) -> None:
    done = int8moe("explain", "--config", f"@{tmp_path}/ä-漢.json", PYTHONIOENCODING="ascii")
    assert done.returncode == 1
    assert "No such file" in done.stderr


def test_interrupt_is_quiet_and_exit_130(int8moe: Command) -> None:
    process = subprocess.Popen(
        [*COMMAND, "run", "--tokens", "65536", "--kernel", "reference.torch"],
        env=int8moe.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("kernel:"):
            break
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert all(line.startswith("int8moe: pack") for line in stderr.splitlines())


@pytest.mark.parametrize("module", ["int8moe.cli.app", "torch", "int8moe.checkpoint"])
def test_interrupt_while_modules_are_imported(int8moe: Command, tmp_path: Path, module: str) -> None:
    """Wherever Ctrl-C comes in the first moments: a module that is imported then sends it."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}:\n"
        "            sys.meta_path.remove(self)\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    done = int8moe("run", "--tokens", "2", site=tmp_path)
    assert (done.returncode, done.stderr) == (130, "")
