"""The INT8MOE_* variables: what each does here, unknown and bad ones, and those that contradict each other."""

from __future__ import annotations

import os
from collections.abc import Callable

from .. import environment
from ..distributions import find_entry_points
from ..errors import ConfigError
from ..hookspecs import ENTRY_POINT_GROUP
from .discovery import REFERENCE, Discovery
from .finding import Finding, note, ok, problem
from .kernels import passes
from .outcome import Outcome

CHECK = "variables"

_READERS: dict[str, Callable[[], object]] = {
    "INT8MOE_STRICT": lambda: environment.flag("INT8MOE_STRICT"),
    "INT8MOE_NUM_THREADS": environment.num_threads_setting,
    "INT8MOE_LOG": environment.log_level,
}


def plugin_names() -> set[str]:
    """Names of all plugins that are installed, of which metadata alone are read."""
    found = find_entry_points(ENTRY_POINT_GROUP)
    return {REFERENCE} | {row.point.name if row.point else row.distribution for row in found}


def invalid_variables(plugins: set[str]) -> dict[str, str]:
    """What is wrong with each variable that would make every verb fail.

    Args:
        plugins: names of the plugins that are installed.
    """
    faults = {}
    for variable, read in _READERS.items():
        try:
            read()
        except ConfigError as error:
            faults[variable] = str(error)
    absent = environment.absent_plugins(plugins)
    return {**faults, **{name: text for name, text in absent.items() if name == "INT8MOE_PLUGINS"}}


def probe_environment(invalid: dict[str, str]) -> dict[str, str]:
    """Variables for the probes: without those that would end each at once, and with every plugin's failure listed."""
    left_out = {*invalid, "INT8MOE_STRICT"}
    return {name: value for name, value in os.environ.items() if name not in left_out}


def check(
    discovery: Discovery, self_tests: dict[str, Outcome], invalid: dict[str, str], plugins: set[str]
) -> list[Finding]:
    """Each variable that is set, with its meaning and what is wrong with it.

    Args:
        discovery: what the plugins declare.
        self_tests: outcomes by kernel.
        invalid: as :func:`invalid_variables` found them.
        plugins: names of the plugins that are installed.
    """
    unknown = environment.unknown_variables()
    findings = []
    for name, meaning in environment.VARIABLES.items():
        if name in invalid:
            findings.append(problem(CHECK, invalid[name], f"unset {name}, or set what is allowed"))
        elif name in os.environ:
            value = environment.text(name)
            findings.append(ok(CHECK, f"{name}={value}: {meaning}" if value else f"{name} is empty, as if unset"))
    findings += [problem(CHECK, text, f"unset {name}, or rename it") for name, text in unknown.items()]
    findings += _plugin_lists(plugins)
    findings += _max_isa(discovery)
    findings += _pinned(discovery, self_tests)
    return findings or [ok(CHECK, f"none is set of {', '.join(environment.VARIABLES)}")]


def _plugin_lists(plugins: set[str]) -> list[Finding]:
    allowed = environment.names("INT8MOE_PLUGINS") or frozenset()
    blocked = environment.names("INT8MOE_DISABLE_PLUGINS") or frozenset()
    findings = []
    if both := ", ".join(sorted(allowed & blocked)):
        text = f"INT8MOE_PLUGINS and INT8MOE_DISABLE_PLUGINS both name {both}, which is blocked"
        findings.append(problem(CHECK, text, f"take {both} out of one of them"))
    absent = environment.absent_plugins(plugins).get("INT8MOE_DISABLE_PLUGINS")
    return [*findings, note(CHECK, absent, "correct or unset INT8MOE_DISABLE_PLUGINS")] if absent else findings


def _max_isa(discovery: Discovery) -> list[Finding]:
    if discovery.max_isa_fault:
        mend = "unset INT8MOE_MAX_ISA, or set a tier that is known"
        return [problem(CHECK, discovery.max_isa_fault, mend)]
    capped = [k.name for k in discovery.kernels if k.refusal and k.refusal.startswith("is above INT8MOE_MAX_ISA")]
    return [note(CHECK, f"INT8MOE_MAX_ISA holds back {', '.join(capped)}")] if capped else []


def _pinned(discovery: Discovery, self_tests: dict[str, Outcome]) -> list[Finding]:
    """What INT8MOE_KERNEL leads to: an error for every layer, or the kernel that it names."""
    name = environment.text("INT8MOE_KERNEL")
    if name is None:
        return []
    good = [kernel for kernel in discovery.kernels if passes(self_tests.get(kernel.name))]
    mend = "unset INT8MOE_KERNEL"
    if good:
        mend += f", or name one that passes: {', '.join(kernel.name for kernel in good)}"
    if name.partition(".")[0] in {plugin.name for plugin in discovery.ended_plugins}:
        return [problem(CHECK, f"INT8MOE_KERNEL names {name}, whose plugin ends the process", mend)]
    if discovery.pinned_fault:
        return [problem(CHECK, f"INT8MOE_KERNEL: {discovery.pinned_fault}", mend)]
    kernel = next((kernel for kernel in discovery.kernels if kernel.name == name), None)
    if kernel is None:  # the plugins could not be read, which is a finding of its own
        return []
    if kernel.refusal is not None:
        text = f"INT8MOE_KERNEL names {name}, which cannot be used: {kernel.refusal}"
        return [problem(CHECK, text, mend)]
    if name in self_tests and not passes(self_tests[name]):
        return [problem(CHECK, f"INT8MOE_KERNEL names {name}, which does not pass its self-test", mend)]
    best = max(good, key=lambda kernel: kernel.priority, default=kernel)
    if best.priority > kernel.priority:
        return [note(CHECK, f"INT8MOE_KERNEL names {name}, though {best.name} can run here and is faster", mend)]
    return []
