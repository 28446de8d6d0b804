"""The comparison as a user runs it: a row for every peer, whatever becomes of it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from peers_folder import PEERS

Compare = Callable[..., subprocess.CompletedProcess[str]]

TINY = ("--shape", "8,2,64,32", "--rounds", "7", "--seconds", "0", "--gigabytes", "0.0001", "--threads", "1")
ANYTHING_GOES = ("--tolerance", "1e9")


class Outcome(NamedTuple):
    status: int
    stdout: str
    stderr: str
    document: Any

    def reason(self, peer: str) -> str:
        return next(row["reason"] for row in self.document["refused"] if row["peer"] == peer)

    def row(self, tokens: int, peer: str) -> Any:
        point = next(point for point in self.document["points"] if point["tokens"] == tokens)
        return next(row for row in point["rows"] if row["peer"] == peer)

    def peer(self, label: str) -> Any:
        return next(peer for peer in self.document["peers"] if peer["peer"] == label)


@pytest.fixture(scope="module")
def outcome(compare: Compare, fakes: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """One run with peers that work and peers that do not."""
    folder = tmp_path_factory.mktemp("results")
    path = folder / "peers.json"
    path.write_text("an older run")
    names = "torch-grouped-bf16,dies,dies-late,hangs,refuses,raises,wrong,absent,kt-kernel"
    done = compare(
        *TINY, *ANYTHING_GOES, "--m", "1,4", "--check", "3", "--peers", names, "--adapters", str(fakes),
        "--python", f"torch={sys.executable}", "--python", "kt-kernel=/nowhere/bin/python", "--json", str(path),
    )  # fmt: skip
    assert [file.name for file in folder.iterdir()] == ["peers.json"]
    return Outcome(done.returncode, done.stdout, done.stderr, json.loads(path.read_text()))


@pytest.mark.parametrize("peer", ["int8moe", "int8moe (again)", "torch-grouped-bf16"])
@pytest.mark.parametrize("tokens", [1, 4])
def test_a_peer_that_works_has_figures(outcome: Outcome, peer: str, tokens: int) -> None:
    row = outcome.row(tokens, peer)
    assert row["reason"] == ""
    assert len(row["blocks_ms"]) == 7
    assert row["calls"] >= 7
    assert 0 < row["best_ms"] <= row["median_ms"]
    assert row["ratio"]["least"] <= row["ratio"]["median"] <= row["ratio"]["most"]
    assert set(row["disturbance"]) == {
        "wall_seconds",
        "foreign_cores",
        "stolen_cores",
        "involuntary_switches_per_second",
    }
    if peer == "int8moe":
        assert row["ratio"] == {"least": 1, "median": 1, "most": 1}


def test_workers_that_compute_the_layer_are_told_from_one_that_does_not(outcome: Outcome) -> None:
    errors = {peer["peer"]: (peer["error"], peer["computes_something_else"]) for peer in outcome.document["peers"]}
    assert 0.001 < errors["int8moe"][0] < 0.05
    assert errors["int8moe (again)"] == errors["int8moe"]
    assert 0 < errors["torch-grouped-bf16"][0] < errors["int8moe"][0]
    assert errors["wrong"] == (1.0, True)
    assert errors["dies-late"] == (None, True)  # not a number
    assert not errors["int8moe"][1]
    assert "its error is above 0.05: it computes something else" in outcome.stdout


def test_all_workers_hold_the_same_layer(outcome: Outcome) -> None:
    assert len({peer["checksum"] for peer in outcome.document["peers"]}) == 1


def test_a_peer_that_dies_is_a_row_with_the_signal(outcome: Outcome) -> None:
    assert outcome.reason("dies") == "ended by SIGILL (an instruction that this CPU does not have) while it loaded"
    reason = outcome.row(4, "dies-late")["reason"]
    assert reason.startswith("ended by SIGABRT")
    assert reason.endswith("it said: assertion failed: abacus")


def test_a_peer_that_hangs_is_ended(outcome: Outcome) -> None:
    assert outcome.reason("hangs").startswith("ended: no answer within 1 s while it loaded")


def test_what_a_peer_says_is_its_reason(outcome: Outcome) -> None:
    assert outcome.reason("refuses") == "this CPU has no abacus"
    assert outcome.reason("raises") == "ImportError: libabacus.so: cannot open"


def test_a_peer_that_fails_at_one_number_of_tokens_has_the_others(outcome: Outcome) -> None:
    assert outcome.row(1, "wrong")["median_ms"] > 0
    assert outcome.row(4, "wrong")["reason"] == "ValueError: four tokens are too many"
    assert outcome.row(4, "wrong")["median_ms"] is None


def test_a_missing_interpreter_says_how_to_name_one(outcome: Outcome) -> None:
    assert "/nowhere/bin/python is no file" in outcome.reason("kt-kernel")
    assert "--python kt-kernel=PATH" in outcome.reason("kt-kernel")
    assert "--python absent=PATH" in outcome.reason("absent")


def test_the_table_has_every_peer_and_every_reason(outcome: Outcome) -> None:
    lines = outcome.stdout.splitlines()
    for row in outcome.document["refused"]:
        assert any(row["peer"] in line and line.endswith(row["reason"]) for line in lines)
    for peer in outcome.document["peers"]:
        assert sum(peer["peer"] in line.split("  ")[1:2] or f" {peer['peer']} " in line for line in lines) >= 2
    assert outcome.stdout.count("int8moe against itself differs by") == 2


def test_peers_asked_for_by_name_that_have_no_figures_fail_the_run(outcome: Outcome) -> None:
    assert outcome.status == 1
    for name in ("dies", "dies-late", "hangs", "refuses", "raises", "wrong", "absent", "kt-kernel"):
        assert f"peers: {name} was asked for and has no figures: " in outcome.stderr
    assert "torch-grouped-bf16 was asked for" not in outcome.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peers", "vlm-cpu"], "there is no peer 'vlm-cpu': did you mean vllm-cpu"),
        (["--shape", "qwen"], "there is no shape 'qwen'"),
        (["--shape", "gpt-oss-20b"], "has swigluoai and biases, and peers are compared with silu"),
        (["--shape", "4,8,64,64"], "'4,8,64,64' sends a token to 8 of 4 experts"),
        (["--m", "1,x"], "'1,x' is no list of token counts"),
        (["--rounds", "3"], "3 is not in the range x>=7"),
        (["--python", "torch"], "'torch' is not NAME=PATH"),
        (["--python", "jax=/usr/bin/python3"], "there is no environment 'jax': they are int8moe, kt-kernel"),
        (["--json", "nowhere/peers.json"], "there is no folder"),
    ],
)
def test_wrong_usage_is_one_line(compare: Compare, arguments: list[str], message: str) -> None:
    done = compare(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert message in done.stderr


def test_more_layers_than_memory_are_refused_before_anything_is_loaded(compare: Compare) -> None:
    done = compare("--gigabytes", "1e6")
    assert done.returncode == 1
    assert "give fewer --peers or less --gigabytes" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_there_is_no_run_without_int8moe(compare: Compare) -> None:
    done = compare("--smoke", "--python", "int8moe=/nowhere/bin/python")
    assert done.returncode == 1
    assert "int8moe has no figures, so there is no ratio: no interpreter: /nowhere/bin/python is no file" in done.stderr


def test_a_file_that_is_no_adapter_is_named(compare: Compare, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("from peer import Pear\n")
    done = compare("--adapters", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.startswith(f"peers: error: a file of {tmp_path} is no adapter: ImportError")
    assert "Pear" in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_no_worker_outlives_the_runner(tmp_path: Path, number: signal.Signals, status: int) -> None:
    """One worker is stopped between its turns by then, another hangs."""
    (tmp_path / "waits.py").write_text(
        "import os, pathlib, time\n"
        "from peer import Adapter, Peer\n"
        "PEERS = (Peer('waits', 'a fake', 'fake', 'Waits', own_python=True),)\n"
        "class Waits(Adapter):\n"
        "    def __init__(self, *arguments):\n"
        f"        pathlib.Path({str(tmp_path)!r}, 'pid').write_text(str(os.getpid()))\n"
        "        time.sleep(1000)\n"
    )
    runner = subprocess.Popen(
        [sys.executable, str(PEERS / "run.py"), *TINY, "--m", "1", "--peers", "waits", "--adapters", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        pid = tmp_path / "pid"
        until(lambda: (pid.exists() and pid.read_text() != "") or runner.poll() is not None)
        workers = [int(word) for word in Path(f"/proc/{runner.pid}/task/{runner.pid}/children").read_text().split()]
        assert int(pid.read_text()) in workers
        assert len(workers) == 2
        runner.send_signal(number)
        output = runner.communicate(timeout=60)[0]
    finally:
        runner.kill()
    assert runner.returncode == status
    assert "Traceback" not in output
    until(lambda: not any(running(worker) for worker in workers))


def running(pid: int) -> bool:
    try:
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def until(condition: Callable[[], bool]) -> None:
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.01)
    pytest.fail("it did not come to pass within a minute")
