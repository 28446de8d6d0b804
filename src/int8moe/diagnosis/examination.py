"""Runs every check: gathers what code in other processes has to find out, and hands it to the checks."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from .finding import Finding, problem
from .outcome import GRACE_SECONDS, Outcome
from .probe_process import Probes

if TYPE_CHECKING:
    from .discovery import Discovery
    from .distributions import Installed

_TORCH_SECONDS = 60.0  # at least, for its import: from a cold disk that takes long, and the limit is not meant for it

Check = Callable[[], list[Finding]]
Section = tuple[str, list[Finding]]


def examine(
    *,
    limit: float = 30.0,
    proc: str | Path = "/proc",
    sys: str | Path = "/sys",
    tell: Callable[[str], object] = lambda text: None,
) -> Iterator[Section]:
    """Examine this installation and this machine.

    Args:
        limit: seconds that each process may take in which plugins or a kernel run.
        proc: where procfs is mounted; a test may hand in a folder of its own.
        sys: the same for sysfs.
        tell: called with what is being waited for.

    Yields:
        The name of each check with its findings, at least one.
    """
    with Probes(limit, os.environ) as probes:
        tell("the plugins")
        declared: _Declared | Exception
        try:
            declared = _declared(probes)
        except Exception as error:  # for want of a package that "versions" names, say
            declared = error
        if isinstance(declared, Exception):
            torch = _start_torch(probes, []).result()
            yield _section("versions", lambda: _versions(torch))
            yield "examination", [_failed("examination", declared)]
            return
        from . import distributions  # only now, as all checks: a package that they need may be absent

        tell("torch and the self-tests of the kernels")
        kernels = [kernel.name for kernel in declared.discovery.kernels if kernel.refusal is None]
        torching = _start_torch(probes, kernels)
        opening = distributions.open_libraries(declared.installed, probes)
        torch = torching.result()
        yield _section("versions", lambda: _versions(torch))
        opened = {name: future.result() for name, future in opening.items()}
        for name, check in _checks(declared, opened, torch, Path(proc), Path(sys)).items():
            yield _section(name, check)


class _Declared(NamedTuple):
    """What plugins and variables say.

    Attributes:
        names: of the plugins that are installed.
        invalid: variables that would make every verb fail, and why.
        discovery: what the plugins declare.
        installed: their distributions.
    """

    names: set[str]
    invalid: dict[str, str]
    discovery: Discovery
    installed: list[Installed]


def _declared(probes: Probes) -> _Declared:
    from . import distributions, variables
    from .discovery import discover

    names = variables.plugin_names()
    invalid = variables.invalid_variables(names)
    probes.environment = variables.probe_environment(invalid)
    discovery = discover(probes)
    installed = distributions.find_installed(row.distribution for row in discovery.plugins)
    return _Declared(names, invalid, discovery, installed)


def _start_torch(probes: Probes, kernels: list[str]) -> Future[Outcome]:
    importing = max(probes.limit, _TORCH_SECONDS)
    parts = 1 + len(kernels)  # its measures, and the self-tests
    arguments = (f"{importing:g}", f"{probes.limit:g}", *kernels)
    return probes.start("torch", *arguments, limit=importing + parts * (probes.limit + GRACE_SECONDS))


def _versions(torch: Outcome) -> list[Finding]:
    from . import versions

    return versions.check(torch)


def _checks(declared: _Declared, opened: dict[str, Outcome], torch: Outcome, proc: Path, sys: Path) -> dict[str, Check]:
    from . import cpu, distributions, huge_pages, kernels, memory, openmp, plugins, preloads, threads, variables

    discovery = declared.discovery
    measures = Outcome.of(torch.last("measured"))
    self_tests = {name: Outcome.of(outcome) for name, outcome in torch.every("self-test")}
    serving = {kernel.distribution for kernel in discovery.kernels if kernel.refusal is None}
    looked_at = {"torch": torch, **self_tests}
    libraries = {name: outcome.last("libraries") for name, outcome in looked_at.items() if outcome.every("libraries")}
    return {
        distributions.CHECK: lambda: distributions.check(declared.installed, opened, serving),
        plugins.CHECK: lambda: plugins.check(discovery),
        cpu.CHECK: lambda: cpu.check(discovery, proc),
        kernels.CHECK: lambda: kernels.check(discovery, self_tests, proc),
        threads.CHECK: lambda: threads.check(measures, proc, sys),
        memory.CHECK: lambda: memory.check(proc, sys),
        huge_pages.CHECK: lambda: huge_pages.check(measures, proc, sys),
        openmp.CHECK: lambda: openmp.check(libraries),
        preloads.CHECK: lambda: preloads.check(proc),
        variables.CHECK: lambda: variables.check(discovery, self_tests, declared.invalid, declared.names),
    }


def _section(name: str, check: Check) -> Section:
    try:
        return name, check()
    except Exception as error:  # the other checks are still worth to be made
        return name, [_failed(name, error)]


def _failed(check: str, error: Exception) -> Finding:
    text = f"this check failed: {type(error).__name__}: {' '.join(str(error).split())}"
    mend = "mend what else is found; if it stays, report it to int8moe"
    if isinstance(error, ImportError):
        mend = f"pip install --force-reinstall {error.name or 'PACKAGE'}, or whatever it is that cannot be imported"
    details = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return problem(check, text, mend, details)
