"""What the system says about CPU, memory, pages and other processes, from folders made by hand."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from int8moe.benchmark.disturbance import Snapshot, between, snapshot
from int8moe.benchmark.machine import this_machine
from made_folders import put

MIB = 1 << 20


@pytest.mark.parametrize(
    "cpuinfo",
    ["processor\t: 0\nmodel name\t: Acme 9000\nflags\t: a\n", "cpu\t\t: Acme 9000\n", "uarch\t: Acme 9000\nmmu : x\n"],
)
def test_model_of_the_cpu(tmp_path: Path, cpuinfo: str) -> None:
    assert this_machine(put(tmp_path, cpuinfo=cpuinfo), tmp_path).cpu == "Acme 9000"


def test_a_machine_that_says_nothing(tmp_path: Path) -> None:
    machine = this_machine(tmp_path, tmp_path)
    assert machine.cpu
    assert machine.cache_bytes is None
    assert snapshot(tmp_path).busy is None


def test_largest_cache(tmp_path: Path) -> None:
    cache = "devices/system/cpu/cpu0/cache/index"
    put(tmp_path, **{f"{cache}0/size": "32K\n", f"{cache}2/size": "512K\n", f"{cache}3/size": "24M\n"})
    assert this_machine(tmp_path, tmp_path).cache_bytes == 24 * MIB


def test_counters_of_procfs(tmp_path: Path) -> None:
    put(tmp_path, stat="cpu  100 200 300 999 50 6 7 80 11 12\ncpu0 1 2\ncpu1 1 2\nintr 5\n")
    found = snapshot(tmp_path)
    tick = os.sysconf("SC_CLK_TCK")
    assert (found.busy, found.steal, found.cpus) == (613 / tick, 80 / tick, 2)


def test_shares_of_others() -> None:
    """In 10 s of 4 CPUs this process used 8 CPU seconds of 18, and the hypervisor took 2."""
    before = Snapshot(100.0, 1.0, 50.0, 5.0, 4, 20, 0.5)
    found = between(before, Snapshot(110.0, 9.0, 68.0, 7.0, 4, 25, 1.5))
    assert (found.seconds, found.own, found.others, found.steal) == (10.0, 0.2, 0.25, 0.05)
    assert (found.involuntary_switches, found.load_before, found.load_after) == (5, 0.5, 1.5)
    assert found.disturbed is True
    assert between(before, Snapshot(110.0, 9.0, 58.5, 5.0, 4, 25, 1.5)).disturbed is False
    assert between(before, Snapshot(110.0, 9.0, 58.5, 7.0, 4, 25, 1.5)).disturbed is True
    assert between(before, Snapshot(110.0, 9.0, None, None, 4, 25, None)).disturbed is None


def test_ticks_are_coarse_but_never_negative() -> None:
    before = Snapshot(0.0, 0.0, 50.0, 0.0, 2, 0, 0.0)
    assert between(before, Snapshot(0.01, 0.015, 50.0, 0.0, 2, 0, 0.0)).others == 0.0
