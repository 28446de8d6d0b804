"""Whether large buffers get huge pages: what the system is set to, and what a buffer of weights really got."""

from __future__ import annotations

import platform
from pathlib import Path

from ..control_groups import file_words
from .finding import Finding, note, ok, problem
from .outcome import Outcome

CHECK = "huge_pages"

BUFFER_BYTES = 64 << 20
"""Of the buffer that is tried; its ends lie on no huge page, so that a little less is the most there can be."""

_COST = "ordinary 4 KiB pages cost 17 to 30 % of the bandwidth that weights are read with"


def check(measures: Outcome, proc: Path, sys: Path) -> list[Finding]:
    """Settings of the system, and the huge pages under a buffer of 64 MiB.

    Args:
        measures: outcome of the probe "torch-measures", which made the buffer.
        proc: where procfs is mounted.
        sys: where sysfs is mounted.
    """
    if platform.system() != "Linux":
        return [ok(CHECK, f"they are asked for on Linux only; this is {platform.system()}")]
    folder = sys / "kernel" / "mm" / "transparent_hugepage"
    setting, file = _setting(folder)
    findings = []
    if setting:
        findings.append(ok(CHECK, f"{file} is {setting}, defrag is {_chosen(folder / 'defrag') or 'unknown'}"))
    got: int | None = measures.last("huge_bytes")
    share = "it is not known what a buffer got" if got is None else f"{got >> 20} of {BUFFER_BYTES >> 20} MiB got them"
    if got is not None and got >= BUFFER_BYTES // 2:
        findings.append(ok(CHECK, share))
    elif setting == "never":
        findings.append(problem(CHECK, f"they are switched off; {_COST}", f"echo madvise | sudo tee {file}"))
    elif "THP_enabled: 0" in " ".join(file_words(proc / "self" / "status")):
        text = f"they are switched off for this process (PR_SET_THP_DISABLE); {_COST}"
        findings.append(problem(CHECK, text, "start it without: a parent process or a service's settings ask for it"))
    elif not setting:
        text = f"the system has no {folder / 'enabled'}; {share}"
        findings.append(note(CHECK, text, "use a system kernel with CONFIG_TRANSPARENT_HUGEPAGE"))
    elif got is None:
        findings.append(note(CHECK, share))
    else:
        mend = "free memory is in small pieces: echo 1 | sudo tee /proc/sys/vm/compact_memory"
        findings.append(note(CHECK, f"only {share}; {_COST}", mend))
    return findings


def _setting(folder: Path) -> tuple[str, Path]:
    """What holds for pages of 2 MiB, and the file that says so: newer kernels have a setting for each size."""
    own = folder / "hugepages-2048kB" / "enabled"
    chosen = _chosen(own)
    if chosen and chosen != "inherit":
        return chosen, own
    return _chosen(folder / "enabled"), folder / "enabled"


def _chosen(path: Path) -> str:
    """The word in brackets; "" where there is none."""
    return next((word[1:-1] for word in file_words(path) if word.startswith("[") and word.endswith("]")), "")
