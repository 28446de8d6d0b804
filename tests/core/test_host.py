"""detect_host on faked proc and sys folders."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from int8moe.errors import ConfigError
from int8moe.host import detect_host, override_thread_limit, thread_limit

AFFINITY = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@pytest.fixture(autouse=True)
def _no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INT8MOE_NUM_THREADS", raising=False)


def fake(
    tmp_path: Path, *, cpuinfo: str = "", cgroup: str = "0::/\n", files: dict[str, str] | None = None
) -> tuple[Path, Path]:
    proc, sys = tmp_path / "proc", tmp_path / "sys"
    (proc / "self").mkdir(parents=True)
    (proc / "cpuinfo").write_text(cpuinfo)
    (proc / "self" / "cgroup").write_text(cgroup)
    (sys / "fs" / "cgroup").mkdir(parents=True)
    for name, text in (files or {}).items():
        path = sys / "fs" / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return proc, sys


@pytest.mark.parametrize(
    ("quota", "share"),
    [
        ("200000 100000", 2),
        ("150000 100000", 1),
        ("50000 100000", 1),
        ("max 100000", None),
        ("garbage", None),
        ("", None),
    ],
)
def test_cgroup_v2_quota_sets_the_threads(tmp_path: Path, quota: str, share: int | None) -> None:
    host = detect_host(*fake(tmp_path, files={"cpu.max": quota}))
    if share is None or share >= AFFINITY:
        assert (host.num_threads, host.num_threads_source) == (AFFINITY, "CPU affinity")
    else:
        assert host.num_threads == share
        assert "cpu.max" in host.num_threads_source


def test_the_tightest_ancestor_counts(tmp_path: Path) -> None:
    files = {"a/b/cpu.max": "max 100000", "a/cpu.max": "100000 100000", "cpu.max": "900000 100000"}
    assert detect_host(*fake(tmp_path, cgroup="0::/a/b\n", files=files)).num_threads == 1


def test_a_path_that_leads_out_of_the_mount_stays_in_it(tmp_path: Path) -> None:
    assert detect_host(*fake(tmp_path, cgroup="0::/../../etc\n", files={"cpu.max": "100000 100000"})).num_threads == 1


def test_cgroup_v1_quota(tmp_path: Path) -> None:
    files = {"cpu/x/cpu.cfs_quota_us": "100000", "cpu/x/cpu.cfs_period_us": "100000"}
    assert detect_host(*fake(tmp_path, cgroup="4:cpu,cpuacct:/x\n", files=files)).num_threads == 1
    (tmp_path / "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us").write_text("-1")
    assert detect_host(tmp_path / "proc", tmp_path / "sys").num_threads == AFFINITY


def test_features_are_passed_through_and_only_what_all_cores_share(tmp_path: Path) -> None:
    text = "processor : 0\nflags\t\t: alpha beta odd_word\n\nprocessor : 1\nflags : alpha beta\n"
    assert detect_host(*fake(tmp_path, cpuinfo=text)).features == {"alpha", "beta"}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("isa\t\t: rv64imafdcv_zicsr_zvl128b", "rv64 i m a f d c v zicsr zvl128b"),
        ("isa : rv32imac", "rv32 i m a c"),
        ("isa : mips1 mips32r2 mips64r2", "mips1 mips32r2 mips64r2"),
        ("flags : sse4_1 avx512f avx512_vnni 3dnow fma4", "sse4_1 avx512f avx512_vnni 3dnow fma4"),
    ],
)
def test_features_that_are_joined_in_one_word(tmp_path: Path, line: str, words: str) -> None:
    assert detect_host(*fake(tmp_path, cpuinfo=line + "\n")).features == set(words.split())


def test_features_in_the_other_spelling(tmp_path: Path) -> None:
    assert detect_host(*fake(tmp_path, cpuinfo="Features\t: one two\n")).features == {"one", "two"}


def test_nothing_to_read_is_no_error(tmp_path: Path) -> None:
    host = detect_host(tmp_path / "absent", tmp_path / "absent")
    assert host.num_threads == AFFINITY


def test_the_variable_wins_and_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INT8MOE_NUM_THREADS", "7")
    host = detect_host(*fake(tmp_path, files={"cpu.max": "50000 100000"}))
    assert (host.num_threads, host.num_threads_source) == (7, "INT8MOE_NUM_THREADS")


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5", "99999999"])
def test_a_bad_number_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("INT8MOE_NUM_THREADS", value)
    with pytest.raises(ConfigError, match="INT8MOE_NUM_THREADS"):
        detect_host(*fake(tmp_path))


def test_override_for_tests_is_put_back() -> None:
    before = thread_limit()
    with override_thread_limit(before + 5):
        assert thread_limit() == before + 5
    assert thread_limit() == before


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="no procfs")
@pytest.mark.skipif(AFFINITY is None or AFFINITY < 2, reason="this process may use one CPU alone")
@pytest.mark.parametrize(
    "command",
    [
        "import int8moe.host, torch",  # noted before the runtime binds
        "import torch; torch.ones(9**6).exp_()",  # seen by the workers
    ],
)
def test_a_main_thread_that_is_bound_to_one_cpu_has_the_others_workers(command: str) -> None:
    """OMP_PROC_BIND: torch's OpenMP runtime binds the main thread when it is loaded, and each worker elsewhere."""
    command += (
        "\nimport os; from int8moe.host import detect_host as d; print(len(os.sched_getaffinity(0)), d().num_threads)"
    )
    environment = {**os.environ, "OMP_PROC_BIND": "true", "OMP_NUM_THREADS": str(AFFINITY)}
    done = subprocess.run([sys.executable, "-c", command], env=environment, capture_output=True, text=True, check=True)
    bound, threads = map(int, done.stdout.split())
    if bound == AFFINITY:
        pytest.skip("torch's OpenMP runtime does not bind here")
    assert threads == detect_host().num_threads
