"""How many threads kernels and torch run on, where the numbers are from, and whether they fit each other."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from ..environment import num_threads_setting
from ..errors import ConfigError
from ..host import OPENMP_BINDING, usable_cpus
from .finding import Finding, note, ok, problem
from .mends import reinstall
from .outcome import Outcome

CHECK = "threads"
_COUNTING = ("OMP_NUM_THREADS", "OMP_THREAD_LIMIT", "MKL_NUM_THREADS")


def check(measures: Outcome, proc: Path, sys: Path) -> list[Finding]:
    """Kernels take the lesser of their own number and torch's.

    Args:
        measures: outcome of the probe "torch-measures".
        proc: where procfs is mounted.
        sys: where sysfs is mounted.
    """
    cpus, cpus_source = usable_cpus(proc, sys)
    findings = [ok(CHECK, f"{_count(cpus, 'CPU')} of {os.cpu_count()} may be used ({cpus_source})")]
    try:
        setting = num_threads_setting()
    except ConfigError:  # a finding about the variables
        setting = None
    limit, source = (cpus, cpus_source) if setting is None else (setting, "INT8MOE_NUM_THREADS")
    found = measures.last("threads")
    if found is None:
        text = f"kernels may use {_count(limit, 'thread')} ({source}); torch's number is not known"
        findings.append(note(CHECK, text))
        if measures.ended:
            text = f"torch's first parallel region: the process {measures.ended}"
            findings.append(problem(CHECK, text, reinstall("torch"), measures.stderr))
        return findings
    threads: int = found["torch"]
    findings.append(
        ok(
            CHECK,
            f"kernels run on {_count(min(limit, threads), 'thread')}: the lesser of {limit} ({source}) and torch's "
            f"{threads} ({_settings(_COUNTING) or 'its default'})",
        )
    )
    if found["cpus_after"] < found["cpus_before"]:
        findings.append(
            problem(
                CHECK,
                f"torch's OpenMP runtime binds the main thread to {_count(found['cpus_after'], 'CPU')} "
                f"({_settings(OPENMP_BINDING) or 'no variable says why'}), and all threads that it starts with it",
                f"unset {' '.join(_set_ones(OPENMP_BINDING)) or 'OMP_PROC_BIND'}, or export INT8MOE_NUM_THREADS={cpus}",
            )
        )
    if min(limit, threads) > cpus:
        text = f"kernels would run {min(limit, threads)} threads on {_count(cpus, 'CPU')} ({cpus_source})"
        findings.append(problem(CHECK, text, f"export INT8MOE_NUM_THREADS={cpus}, or unset it"))
    elif threads > cpus:
        text = f"torch runs {threads} threads on {_count(cpus, 'CPU')} ({cpus_source}); kernels keep to {limit}"
        findings.append(note(CHECK, text, f"export OMP_NUM_THREADS={cpus}"))
    elif threads < limit and (setting is not None or _set_ones(_COUNTING)):
        text = f"torch keeps kernels to {threads} of {_count(limit, 'thread')}"
        findings.append(note(CHECK, text, f"export OMP_NUM_THREADS={limit}, or call torch.set_num_threads({limit})"))
    return findings


def _set_ones(names: Iterable[str]) -> list[str]:
    return [name for name in names if os.environ.get(name, "").strip()]


def _settings(names: Iterable[str]) -> str:
    return ", ".join(f"{name}={os.environ[name]}" for name in _set_ones(names))


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
