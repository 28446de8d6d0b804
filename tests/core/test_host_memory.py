"""Free memory, limits of control groups, and huge pages, from folders made by hand."""

from __future__ import annotations

from pathlib import Path

from int8moe.host_memory import available_memory, huge_bytes
from made_folders import put

MIB = 1 << 20


def test_a_machine_that_says_nothing(tmp_path: Path) -> None:
    assert available_memory(tmp_path, tmp_path) is None


def test_memory_of_the_system_and_of_its_control_groups(tmp_path: Path) -> None:
    put(tmp_path, meminfo="MemTotal: 9 kB\nMemAvailable:    2048 kB\n", self__cgroup="0::/a/b\n4:memory:/c\n")
    assert available_memory(tmp_path, tmp_path) == 2 * MIB
    put(tmp_path, **{"fs/cgroup/a/b/memory.max": "max\n", "fs/cgroup/a/b/memory.current": "5\n"})
    assert available_memory(tmp_path, tmp_path) == 2 * MIB
    put(tmp_path, **{"fs/cgroup/a/memory.max": f"{3 * MIB}\n", "fs/cgroup/a/memory.current": f"{2 * MIB}\n"})
    assert available_memory(tmp_path, tmp_path) == MIB
    put(tmp_path, **{"fs/cgroup/a/memory.stat": f"anon 7\ninactive_file {MIB // 2}\n"})  # dropped when wanted
    assert available_memory(tmp_path, tmp_path) == MIB * 3 // 2
    first = "fs/cgroup/memory/c/memory"
    put(tmp_path, **{f"{first}.limit_in_bytes": "1000\n", f"{first}.usage_in_bytes": "900\n"})
    assert available_memory(tmp_path, tmp_path) == 100


def test_huge_bytes_of_a_buffer(tmp_path: Path) -> None:
    smaps = tmp_path / "self" / "smaps"
    smaps.parent.mkdir()
    smaps.write_text(
        "7f0000000000-7f0000200000 rw-p 00000000 00:00 0 \nRss: 2048 kB\nAnonHugePages:   2048 kB\n"
        "7f0000200000-7f0000600000 rw-p 00000000 00:00 0 \nAnonHugePages:   4096 kB\n"
        "7f0000600000-7f0000800000 rw-p 00000000 00:00 0 /some/file\nAnonHugePages:   2048 kB\n",
    )
    assert huge_bytes(0x7F0000200000, 4 * MIB, tmp_path) == 4 * MIB
    assert huge_bytes(0x7F00001FF000, 5 * MIB, tmp_path) == 5 * MIB  # no more than the buffer has
    assert huge_bytes(0x7E0000000000, MIB, tmp_path) is None
    smaps.unlink()
    assert huge_bytes(0x7F0000200000, 4 * MIB, tmp_path) is None
