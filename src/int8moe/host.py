"""What the operating system says about this machine: feature words, and how many threads are ours.

The core gives feature words no meaning; it passes them through as the system spells them. Imports no torch.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path

from .contracts import HostInfo
from .control_groups import controller_folders, file_words, unified_folders
from .environment import num_threads_setting

OPENMP_BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""Variables by which an OpenMP runtime binds threads to CPUs."""

_AFFINITY_AT_IMPORT = frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ())


def _separate(text: str) -> set[str]:
    """Extensions of a line "isa", which joins them: a base that ends in a number, letters, names after underscores."""
    words: set[str] = set()
    for word in text.split():
        base, *names = word.split("_")
        joined = re.fullmatch(r"([a-z]+[0-9]+)([a-z]+)", base)
        words.update((joined[1], *joined[2], *names) if joined else (word,))
    return words


# Keys of /proc/cpuinfo, in lower case: how their values are read.
_FEATURE_KEYS: dict[str, Callable[[str], Iterable[str]]] = {"flags": str.split, "features": str.split, "isa": _separate}


def detect_host(proc: str | Path = "/proc", sys: str | Path = "/sys") -> HostInfo:
    """Describe this machine.

    Args:
        proc: where procfs is mounted; a test may hand in a folder of its own.
        sys: the same for sysfs (control groups lie in ``<sys>/fs/cgroup``).
    """
    threads, source = _threads(Path(proc), Path(sys))
    return HostInfo(
        machine=platform.machine(),
        system=platform.system(),
        features=feature_words(proc),
        num_threads=threads,
        num_threads_source=source,
    )


def feature_words(proc: str | Path = "/proc") -> frozenset[str]:
    """The CPU's feature words as the system spells them; none where it lists none.

    Args:
        proc: where procfs is mounted.
    """
    try:
        text = (Path(proc) / "cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return _sysctl_features() if platform.system() == "Darwin" else frozenset()
    words: set[str] | None = None
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        read = _FEATURE_KEYS.get(key.strip().lower())
        if colon and read is not None:
            # Cores may differ: only what every one of them has is safe, since a thread may move.
            words = set(read(value)) if words is None else words.intersection(read(value))
    return frozenset(words or ())


def _sysctl_features() -> frozenset[str]:
    """Names below ``hw.optional`` that are 1, without their prefix, and the words of machdep.cpu.*features."""
    import subprocess  # here, since starting up is measured

    try:
        text = subprocess.run(
            ["sysctl", "hw.optional", "machdep.cpu"], capture_output=True, text=True, timeout=5, check=False
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return frozenset()
    words: set[str] = set()
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.startswith("hw.optional.") and value.strip() == "1":
            words.add(key.rpartition(".")[2].lower())
        elif key.startswith("machdep.cpu.") and key.endswith("features"):
            words.update(value.lower().split())
    return frozenset(words)


def usable_cpus(proc: str | Path = "/proc", sys: str | Path = "/sys") -> tuple[int, str]:
    """CPUs that this process may keep busy, and what says so: its affinity, or a tighter quota of a control group.

    Args:
        proc: where procfs is mounted.
        sys: where sysfs is mounted.
    """
    affinity = len(_affinity(Path(proc))) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    share, source = _cgroup_share(Path(proc), Path(sys))
    if share < affinity:
        return max(1, math.floor(share)), source
    return affinity, "CPU affinity"


def _affinity(proc: Path) -> set[int]:
    """CPUs that any thread of this process may run on.

    Of one thread alone that says too little: where one of OPENMP_BINDING is set, the OpenMP runtime that comes with
    torch binds the main thread to one CPU when it is loaded, and later each of its workers to another. Then what the
    thread was allowed before that counts, too.
    """
    cpus = set(os.sched_getaffinity(0))
    if any(os.environ.get(name, "").strip() for name in OPENMP_BINDING):
        cpus |= _AFFINITY_AT_IMPORT
    with contextlib.suppress(OSError):  # no procfs
        for task in (proc / "self" / "task").iterdir():
            with contextlib.suppress(OSError, ValueError):  # the thread has ended
                cpus |= os.sched_getaffinity(int(task.name))
    return cpus


def _threads(proc: Path, sys: Path) -> tuple[int, str]:
    setting = num_threads_setting()
    return usable_cpus(proc, sys) if setting is None else (setting, "INT8MOE_NUM_THREADS")


def _cgroup_share(proc: Path, sys: Path) -> tuple[float, str]:
    """CPUs that the tightest control group around this process grants, and the file that says so."""
    best, source = math.inf, ""
    for quota_file, quota, period in _cgroup_quotas(proc, sys):
        if quota > 0 and period > 0 and quota / period < best:
            best, source = quota / period, f"{quota_file.relative_to(sys)} ({quota} / {period})"
    return best, source


def _cgroup_quotas(proc: Path, sys: Path) -> Iterator[tuple[Path, int, int]]:
    for directory in unified_folders(proc, sys):
        words = file_words(directory / "cpu.max")
        if len(words) == 2 and words[0] != "max":
            with contextlib.suppress(ValueError):
                yield directory / "cpu.max", int(words[0]), int(words[1])
    for directory in controller_folders(proc, sys, "cpu"):
        quota, period = file_words(directory / "cpu.cfs_quota_us"), file_words(directory / "cpu.cfs_period_us")
        if quota and period:
            with contextlib.suppress(ValueError):
                yield directory / "cpu.cfs_quota_us", int(quota[0]), int(period[0])


@lru_cache(maxsize=1)
def this_host() -> HostInfo:
    """This machine, looked at once per process."""
    return detect_host()


_override: int | None = None


def thread_limit() -> int:
    """Most workers that a kernel may use in one parallel region; kernels take the lesser of this and torch's."""
    return this_host().num_threads if _override is None else _override


@contextlib.contextmanager
def override_thread_limit(count: int) -> Iterator[None]:
    """For tests and benchmarks: answer ``count`` from :func:`thread_limit` meanwhile."""
    global _override
    previous, _override = _override, count
    try:
        yield
    finally:
        _override = previous


_threads_before_fork = 1
_forked_with_threads = False


def _count_threads() -> None:
    global _threads_before_fork
    try:
        _threads_before_fork = len(list(Path("/proc/self/task").iterdir()))
    except OSError:  # no procfs: assume that there are some
        _threads_before_fork = 2


def _note_fork() -> None:
    global _forked_with_threads
    _forked_with_threads = _forked_with_threads or _threads_before_fork > 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_count_threads, after_in_child=_note_fork)


def forked_with_threads() -> bool:
    """Whether this process was forked from one that had other threads.

    Thread pools do not survive that: whoever asks one for help waits for ever, so everything has to run serially.
    """
    return _forked_with_threads
