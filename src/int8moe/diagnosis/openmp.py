"""OpenMP runtimes: two in one process fight for the CPUs, and may hang or crash it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from .discovery import REFERENCE
from .finding import Finding, note, ok, problem
from .mends import leave_out

CHECK = "openmp"
_RUNTIME = re.compile(r"/lib(gomp|iomp5|omp)\b[^/]*$")
_TOLERATED = "KMP_DUPLICATE_LIB_OK"


def check(libraries: Mapping[str, Sequence[str] | None]) -> list[Finding]:
    """One runtime, or each of them with what brought it.

    Args:
        libraries: shared libraries of a process, by what was loaded into it ("torch", or a kernel's name, which is
            loaded with torch and all plugins); None where the system does not list them.
    """
    origins: dict[str, str] = {}
    for what, paths in libraries.items():
        for path in paths or ():
            if _RUNTIME.search(path):
                origins.setdefault(path, what)
    if not libraries:
        return [note(CHECK, "not known: no process could import torch")]
    known = [what for what, paths in libraries.items() if paths is not None]
    if not known:
        return [note(CHECK, "the system does not list the libraries of a process")]
    findings = []
    if len(origins) < 2:
        where = f"one runtime: {next(iter(origins))}" if origins else "no runtime"
        findings.append(ok(CHECK, f"{where} (after {', '.join(known)})"))
    else:
        text = f"{len(origins)} runtimes in one process: "
        text += ", ".join(f"{path} (with {what})" for path, what in origins.items())
        findings.append(problem(CHECK, text, _mend([what for what in origins.values() if what != "torch"])))
    if os.environ.get(_TOLERATED, "").strip().lower() in ("1", "true", "yes"):
        text = f"{_TOLERATED} is set: a second runtime is tolerated in silence, and may give wrong results"
        findings.append(note(CHECK, text, f"unset {_TOLERATED}"))
    return findings


def _mend(kernels: list[str]) -> str:
    if not kernels:
        return "reinstall torch alone in a fresh environment: what it loads is from two installations, or preloaded"
    plugins = {kernel.partition(".")[0] for kernel in kernels} - {REFERENCE} or {"NAME"}
    return f"leave out what brought the second one: {leave_out(*plugins)}; or build it against torch's runtime"
