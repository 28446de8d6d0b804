"""CPU features, threads, memory and huge pages, on faked proc and sys folders."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from int8moe.diagnosis import cpu, huge_pages, memory, threads
from int8moe.diagnosis.discovery import Discovery, KernelReading
from int8moe.diagnosis.finding import Finding
from int8moe.diagnosis.outcome import Outcome

AFFINITY = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
MIB, GIB = 1 << 20, 1 << 30
VARIABLES = (
    "INT8MOE_NUM_THREADS", "OMP_NUM_THREADS", "OMP_THREAD_LIMIT", "MKL_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES",
    "GOMP_CPU_AFFINITY", "KMP_AFFINITY",
)  # fmt: skip


class Roots:
    """Faked proc and sys folders."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.sys = folder / "proc", folder / "sys"

    def write(self, name: str, text: str) -> Path:
        path = self.proc.parent / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path


@pytest.fixture
def roots(tmp_path: Path) -> Roots:
    return Roots(tmp_path)


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def worst(findings: list[Finding]) -> Finding:
    """The one finding that is most severe; a problem always has its mend."""
    assert all(row.mend for row in findings if row.severity == "problem")
    order = ("problem", "note", "ok")
    return min(findings, key=lambda row: order.index(row.severity))


# CPU features


def kernel(isa: list[list[str]], unavailable: str | None) -> Discovery:
    reading = KernelReading("acme.fast", "acme-kernels", "cpu", isa, 50, unavailable, unavailable)
    return Discovery(kernels=(reading,))


@pytest.mark.parametrize(
    ("listed", "unavailable", "severity", "words"),
    [
        ("zvx9 zmat2", None, "ok", ["lists zvx9 + zmat2", "agrees"]),
        ("zvx8", "no ZVX9", "ok", ["does not list zvx9", "no ZVX9"]),
        ("zvx9 zmat2", "state is not enabled", "note", ["lists zvx9 + zmat2", "but", "state is not enabled"]),
        ("zvx9", None, "ok", ["does not list zmat2", "finds nothing else missing"]),  # the probe need not look at it
    ],
)
def test_readings_of_the_system_and_of_the_probe(
    roots: Roots, listed: str, unavailable: str | None, severity: str, words: list[str]
) -> None:
    roots.write("proc/cpuinfo", f"flags : fpu {listed}\n")
    machine, finding = cpu.check(kernel([["zvx9", "zmat2"]], unavailable), roots.proc)
    assert machine.severity == "ok"
    assert finding.severity == severity
    assert all(word in finding.text for word in words), finding.text
    assert bool(finding.mend) == (severity == "note")


def test_one_of_several_feature_sets_is_enough(roots: Roots) -> None:
    roots.write("proc/cpuinfo", "Features : neon\n")
    assert worst(cpu.check(kernel([["zvx9"], ["neon"]], None), roots.proc)).severity == "ok"


def test_a_system_that_lists_no_features(roots: Roots) -> None:
    assert "no feature words" in worst(cpu.check(kernel([], None), roots.proc)).text


# Threads


def measured(number: int, cpus_before: int = 64, cpus_after: int = 64) -> Outcome:
    return Outcome((("threads", {"torch": number, "cpus_before": cpus_before, "cpus_after": cpus_after}),))


def test_threads_and_where_the_numbers_are_from(roots: Roots) -> None:
    findings = threads.check(measured(AFFINITY), roots.proc, roots.sys)
    assert worst(findings).severity == "ok"
    assert f"kernels run on {AFFINITY} thread" in findings[-1].text
    assert "CPU affinity" in findings[-1].text


def test_quota_of_a_control_group_below_torchs_threads(roots: Roots) -> None:
    roots.write("sys/fs/cgroup/cpu.max", "100000 100000")
    finding = worst(threads.check(measured(8), roots.proc, roots.sys))
    assert (finding.severity, finding.mend) == ("note", "export OMP_NUM_THREADS=1")
    assert "cpu.max (100000 / 100000)" in finding.text


def test_more_threads_asked_for_than_cpus(roots: Roots, monkeypatch: pytest.MonkeyPatch) -> None:
    roots.write("sys/fs/cgroup/cpu.max", "100000 100000")
    monkeypatch.setenv("INT8MOE_NUM_THREADS", "8")
    finding = worst(threads.check(measured(8), roots.proc, roots.sys))
    assert finding.severity == "problem"
    assert "8 threads on 1 CPU" in finding.text
    assert "INT8MOE_NUM_THREADS=1" in finding.mend


def test_torch_has_fewer_threads_than_asked_for(roots: Roots, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("INT8MOE_NUM_THREADS", str(AFFINITY + 1))
    findings = threads.check(measured(1), roots.proc, roots.sys)
    assert "OMP_NUM_THREADS=1" in findings[1].text
    assert worst(findings).severity == "note"
    assert f"OMP_NUM_THREADS={AFFINITY + 1}" in worst(findings).mend


def test_openmp_binds_the_main_thread(roots: Roots, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_PROC_BIND", "true")
    finding = worst(threads.check(measured(AFFINITY, cpus_before=4, cpus_after=1), roots.proc, roots.sys))
    assert finding.severity == "problem"
    assert "OMP_PROC_BIND=true" in finding.text
    assert finding.mend.startswith("unset OMP_PROC_BIND")


def test_a_bad_number_of_threads_does_not_hide_the_rest(roots: Roots, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INT8MOE_NUM_THREADS", "many")
    assert f"{AFFINITY} (CPU affinity)" in threads.check(measured(AFFINITY), roots.proc, roots.sys)[1].text


def test_a_crash_in_torchs_first_parallel_region(roots: Roots) -> None:
    finding = worst(threads.check(Outcome((), "was ended by SIGSEGV", "stack"), roots.proc, roots.sys))
    assert (finding.severity, finding.details) == ("problem", "stack")
    assert "SIGSEGV" in finding.text


# Memory


def meminfo(roots: Roots, available: int, total: int = 32 * GIB) -> None:
    roots.write("proc/meminfo", f"MemTotal: {total >> 10} kB\nMemFree: 1 kB\nMemAvailable: {available >> 10} kB\n")


@pytest.mark.parametrize(("available", "severity"), [(16 * GIB, "ok"), (GIB, "note"), (64 * MIB, "problem")])
def test_free_memory(roots: Roots, available: int, severity: str) -> None:
    meminfo(roots, available)
    (finding,) = memory.check(roots.proc, roots.sys)
    assert finding.severity == severity
    assert "of 32.0 GiB are free" in finding.text


@pytest.mark.parametrize("version", [1, 2])
def test_limits_of_control_groups(roots: Roots, version: int) -> None:
    """What the system would drop is not in use; a group without a limit is none."""
    meminfo(roots, 16 * GIB)
    roots.write("proc/self/cgroup", "4:memory:/box\n0::/box\n")
    if version == 2:
        folder, names = "sys/fs/cgroup/box", ("memory.max", "memory.current", "inactive_file")
        roots.write("sys/fs/cgroup/memory.max", "max")
        roots.write("sys/fs/cgroup/memory.current", "5")
    else:
        folder = "sys/fs/cgroup/memory/box"
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        roots.write("sys/fs/cgroup/memory/memory.limit_in_bytes", str(2**63 - 4096))
        roots.write("sys/fs/cgroup/memory/memory.usage_in_bytes", "5")
    roots.write(f"{folder}/{names[0]}", str(8 * GIB))
    roots.write(f"{folder}/{names[1]}", str(6 * GIB))
    roots.write(f"{folder}/memory.stat", f"anon 1\n{names[2]} {4 * GIB}\n")
    free, limit = memory.check(roots.proc, roots.sys)
    assert free.severity == limit.severity == "ok"
    assert f"{names[0]} limits this process to 8.0 GiB, of which 6.0 GiB are free" in limit.text
    roots.write(f"{folder}/{names[1]}", str(12 * GIB - 1))
    assert worst(memory.check(roots.proc, roots.sys)).severity == "problem"


def test_memory_is_not_known(roots: Roots) -> None:
    assert worst(memory.check(roots.proc, roots.sys)).severity == "note"


# Huge pages

THP = "sys/kernel/mm/transparent_hugepage"
linux_only = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="huge pages are asked for on Linux only")


def got(count: int | None) -> Outcome:
    return Outcome((("huge_bytes", count),))


def set_thp(roots: Roots, chosen: str) -> None:
    words = " ".join(f"[{word}]" if word == chosen else word for word in ("always", "madvise", "never"))
    roots.write(f"{THP}/enabled", words)
    roots.write(f"{THP}/defrag", "always defer defer+madvise [madvise] never")


@linux_only
def test_huge_pages_are_given(roots: Roots) -> None:
    set_thp(roots, "madvise")
    setting, share = huge_pages.check(got(62 * MIB), roots.proc, roots.sys)
    assert (setting.severity, share.severity) == ("ok", "ok")
    assert "is madvise, defrag is madvise" in setting.text
    assert share.text == "62 of 64 MiB got them"


@linux_only
@pytest.mark.parametrize("own", [False, True])
def test_huge_pages_are_switched_off(roots: Roots, own: bool) -> None:
    """For all sizes, or for this one."""
    set_thp(roots, "madvise" if own else "never")
    if own:
        roots.write(f"{THP}/hugepages-2048kB/enabled", "always inherit madvise [never]")
    finding = worst(huge_pages.check(got(0), roots.proc, roots.sys))
    assert finding.severity == "problem"
    file = roots.sys / "kernel/mm/transparent_hugepage" / ("hugepages-2048kB/enabled" if own else "enabled")
    assert finding.mend == f"echo madvise | sudo tee {file}"


@linux_only
def test_huge_pages_are_switched_off_for_the_process(roots: Roots) -> None:
    set_thp(roots, "always")
    roots.write("proc/self/status", "Name:\tpython\nTHP_enabled:\t0\n")
    finding = worst(huge_pages.check(got(0), roots.proc, roots.sys))
    assert finding.severity == "problem"
    assert "PR_SET_THP_DISABLE" in finding.text


@linux_only
@pytest.mark.parametrize(("count", "setting"), [(2 * MIB, "madvise"), (None, "madvise"), (0, ""), (None, "")])
def test_huge_pages_without_a_known_cause_are_a_note(roots: Roots, count: int | None, setting: str) -> None:
    if setting:
        set_thp(roots, setting)
    assert worst(huge_pages.check(got(count), roots.proc, roots.sys)).severity == "note"
