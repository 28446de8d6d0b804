"""The distributions that bring kernels: where they are, what they require, and their native libraries."""

from __future__ import annotations

import re
from collections.abc import Iterable
from concurrent.futures import Future
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from .finding import Finding, note, ok, problem
from .mends import reinstall, source_of
from .outcome import Outcome
from .probe_process import Probes
from .requirements import installed_version, requirements_of

CHECK = "distributions"
_CORE = "int8moe"
_NATIVE = re.compile(r"\.(so|so\.[0-9.]+|dylib|dll|pyd)$")


class Installed(NamedTuple):
    """One distribution.

    Attributes:
        where: the folder that it lies in, or that an editable install was made from.
        libraries: its native libraries, whether they are there or not.
        unmet: requirements that what is installed does not meet.
        fault: why its metadata cannot be read, or "".
    """

    name: str
    version: str = ""
    where: str = ""
    libraries: tuple[Path, ...] = ()
    unmet: tuple[str, ...] = ()
    fault: str = ""


def find_installed(names: Iterable[str]) -> list[Installed]:
    """The distributions of these names, of which metadata alone are read."""
    found = []
    for name in sorted(set(names)):
        if name == _CORE and installed_version(name) is None:
            continue  # run from its source: a finding about the versions
        try:
            found.append(_read(name, metadata.distribution(name)))
        except Exception as error:  # damaged metadata end importlib's calls in any way
            found.append(Installed(name, fault=f"{type(error).__name__}: {' '.join(str(error).split())}"))
    return found


def _read(name: str, distribution: metadata.Distribution) -> Installed:
    files = [Path(str(distribution.locate_file(file))) for file in distribution.files or ()]
    requirements, source = requirements_of(distribution), source_of(distribution)
    return Installed(
        name=name,
        version=str(distribution.version),
        where=f"editable, from {source.folder}" if source and source.editable else str(distribution.locate_file("")),
        libraries=tuple(sorted(path for path in files if _NATIVE.search(path.name))),
        unmet=tuple(f"{row.text} (found is {row.version or 'nothing'})" for row in requirements if not row.met),
    )


def open_libraries(installed: Iterable[Installed], probes: Probes) -> dict[str, Future[Outcome]]:
    """Open the native libraries of each distribution in a process of its own."""
    return {
        row.name: probes.start("native-libraries", *(str(path) for path in row.libraries if path.is_file()))
        for row in installed
        if row.libraries
    }


def check(installed: Iterable[Installed], opened: dict[str, Outcome], serving: set[str]) -> list[Finding]:
    """Requirements, missing and unloadable libraries, and versions of the kernel driver that they were built on.

    Args:
        installed: distributions with plugins.
        opened: outcomes of the probe "native-libraries" by distribution.
        serving: distributions that have a kernel which this machine can run: there a library which does not load is
            one for other machines, and only noted.
    """
    findings = []
    for row in installed:
        if row.fault:
            text = f"{row.name}: its metadata cannot be read ({row.fault})"
            findings.append(problem(CHECK, text, reinstall(row.name)))
            continue
        findings.append(ok(CHECK, f"{row.name} {row.version} ({row.where})"))
        mend = reinstall(row.name)
        findings += [problem(CHECK, f"{row.name} needs {text}", f"install a release of both that match, or {mend}")
                     for text in row.unmet]  # fmt: skip
        findings += [
            problem(CHECK, f"{row.name}: {path} is missing", mend) for path in row.libraries if not path.is_file()
        ]
        if row.name in opened:
            findings += _libraries(row, opened[row.name], mend, row.name in serving)
    return findings


def _libraries(row: Installed, outcome: Outcome, mend: str, serves: bool) -> list[Finding]:
    from ..contracts import NUMERICS_VERSION as numerics

    driver = _driver_version()
    findings = []
    for library in outcome.every("opened"):
        where = f"{row.name}: {library['path']}"
        if library["error"]:
            text = f"{where} does not load: {library['error']}"
            findings.append(note(CHECK, text, mend) if serves else problem(CHECK, text, mend))
        elif library["numerics"] not in (None, numerics):
            text = f"{where} computes numerics version {library['numerics']}, int8moe has {numerics}"
            findings.append(problem(CHECK, text, mend))
        elif library["driver"] in (None, driver):
            built = "" if library["driver"] is None else f" (kernel driver {driver}, numerics {numerics})"
            findings.append(ok(CHECK, f"{where} loads{built}"))
        else:
            text = (
                f"{where} loads; it is built on kernel driver {library['driver']}, and int8moe's headers have {driver}"
            )
            findings.append(note(CHECK, text, f"where the plugin does not load: {mend}"))
    if outcome.ended:
        culprit = outcome.last("opening") or "its libraries"
        text = f"{row.name}: the process that opened {culprit} {outcome.ended}"
        findings.append(problem(CHECK, text, mend, outcome.stderr))
    return findings


def _driver_version() -> int | None:
    """INT8MOE_DRIVER_VERSION of the headers that int8moe carries."""
    from .. import get_include

    header = (Path(get_include()) / "int8moe" / "abi.h").read_text(encoding="utf-8")
    found = re.search(r"#define INT8MOE_DRIVER_VERSION (\d+)", header)
    return int(found[1]) if found else None
