"""Libraries that are put before all others in each process, such as allocators."""

from __future__ import annotations

import os
import re
from pathlib import Path

from .finding import Finding, ok, problem
from .mapped_libraries import mapped_libraries

CHECK = "preloads"
VARIABLES = ("LD_PRELOAD", "DYLD_INSERT_LIBRARIES")
_ALLOCATOR = re.compile(r"(jemalloc|tcmalloc|mimalloc)[^/]*$")


def check(proc: Path) -> list[Finding]:
    """What is preloaded, and whether it is there; which allocator serves.

    Args:
        proc: where procfs is mounted.
    """
    mapped = mapped_libraries(proc)
    findings = []
    for variable in VARIABLES:
        for entry in filter(None, re.split(r"[\s:]+", os.environ.get(variable, ""))):
            if _is_absent(entry, mapped):
                text = f"{variable} names {entry}, which the system could not load"
                findings.append(problem(CHECK, text, f"correct the path, or unset {variable}"))
            else:
                findings.append(ok(CHECK, f"{variable} names {entry}"))
    allocators = [path for path in mapped or () if _ALLOCATOR.search(path)]
    serves = f"the allocator is {allocators[0]}" if allocators else "the allocator is the C library's"
    return [*(findings or [ok(CHECK, "nothing is preloaded")]), *([] if mapped is None else [ok(CHECK, serves)])]


def _is_absent(entry: str, mapped: list[str] | None) -> bool:
    if "$" in entry:  # the loader fills something in
        return False
    if "/" in entry:
        file = Path(entry)
        return not file.is_file() or (mapped is not None and ".so" in file.name and str(file.resolve()) not in mapped)
    return mapped is not None and not any(path.rpartition("/")[2].startswith(entry) for path in mapped)
