"""Which kernels this machine can run, and whether they give the right answer."""

from __future__ import annotations

from pathlib import Path

from ..host import feature_words
from .cpu import lists_features
from .discovery import REFERENCE, Discovery, KernelReading
from .finding import Finding, note, ok, problem
from .mends import leave_out, reinstall
from .outcome import Outcome, without_import_frames

CHECK = "kernels"


def check(discovery: Discovery, self_tests: dict[str, Outcome], proc: Path) -> list[Finding]:
    """Each kernel with its self-test, or why it cannot run; and whether any but the reference can.

    Args:
        discovery: what the plugins declare.
        self_tests: outcomes by kernel; one that is absent was not tested, since torch could not be imported.
        proc: where procfs is mounted.
    """
    if discovery.outcome.last("kernels") is None:
        return [note(CHECK, "they are not known: see what is found about the plugins")]
    ranked = sorted(discovery.kernels, key=lambda kernel: (kernel.refusal is not None, -kernel.priority, kernel.name))
    findings = [_kernel(kernel, self_tests.get(kernel.name)) for kernel in ranked]
    return [*findings, *_only_the_reference(discovery, proc)]


def passes(outcome: Outcome | None) -> bool:
    """Whether a self-test ended well."""
    return outcome is not None and outcome.last("passed") is not None and not outcome.ended


def _kernel(kernel: KernelReading, outcome: Outcome | None) -> Finding:
    if kernel.refusal is not None:
        return ok(CHECK, f"{kernel.name} cannot run here: {kernel.refusal}")
    if outcome is None:
        return note(CHECK, f"{kernel.name} was not tested: see what is found about torch")
    mend = _mend(kernel)
    if failed := outcome.last("failed"):
        return problem(
            CHECK, f"{kernel.name} does not pass: {failed['text']}", mend, without_import_frames(failed["traceback"])
        )
    passed = outcome.last("passed")
    if passed is None:
        text = f"{kernel.name}: the process of its self-test {outcome.how_it_ended}"
        return problem(CHECK, text, mend, outcome.stderr)
    if outcome.ended:
        text = f"{kernel.name} passes its self-test, but the process then {outcome.ended}"
        return problem(CHECK, text, mend, outcome.stderr)
    if not passed["was_tested"]:
        return note(CHECK, f"{kernel.name} loads; its known answer was not checked (device {kernel.device})")
    serially = ", serially" if passed["was_serial"] else ""
    return ok(CHECK, f"{kernel.name} passes its self-test ({passed['seconds']:.1f} s{serially})")


def _mend(kernel: KernelReading) -> str:
    if kernel.namespace == REFERENCE:
        return f"{reinstall('torch')}; if it stays, report it to int8moe"
    return f"report it to {kernel.distribution}, and leave it out meanwhile: {leave_out(kernel.namespace)}"


def _only_the_reference(discovery: Discovery, proc: Path) -> list[Finding]:
    """Nothing, unless the slow reference is all that can run though this machine could do better."""
    if any(kernel.refusal is None for kernel in discovery.native_kernels):
        return []
    slow = "only the reference kernel can run here, which is slow"
    if discovery.hints:
        return [problem(CHECK, slow, "; or ".join(discovery.hints))]
    words = feature_words(proc)
    refused = [k for k in discovery.native_kernels if k.isa and k.unavailable is not None and lists_features(k, words)]
    if refused:
        kernel = refused[0]
        text = f"{slow}, though the system lists what {kernel.name} needs; its plugin says: {kernel.unavailable}"
        return [problem(CHECK, text, reinstall(kernel.distribution))]
    return [note(CHECK, f"{slow}; no plugin that is loaded has a kernel for this machine")]
