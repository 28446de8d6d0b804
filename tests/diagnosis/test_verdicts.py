"""Kernels, versions and variables: what is said of readings that were made elsewhere."""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from int8moe.diagnosis import kernels, variables, versions
from int8moe.diagnosis.discovery import Discovery, EndedPlugin, KernelReading
from int8moe.diagnosis.finding import Finding
from int8moe.diagnosis.outcome import Outcome

REFERENCE = KernelReading("reference.torch", "int8moe", "cpu", [], 0, None, None)
FAST = KernelReading("acme.fast", "acme-kernels", "cpu", [["zvx9"]], 50, None, None)
REFUSED = FAST._replace(unavailable="libacme.so is missing", refusal="libacme.so is missing")
GOOD = Outcome((("passed", {"was_tested": True, "seconds": 0.25, "was_serial": False}),))
WRONG = Outcome((("failed", {"text": "it is wrong", "traceback": "Traceback: wrong"}),))


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("INT8MOE_")]:
        monkeypatch.delenv(name)


def declared(*readings: KernelReading, **fields: Any) -> Discovery:
    return Discovery(kernels=readings, outcome=Outcome((("kernels", []), ("plugins", []))), **fields)


def problems(findings: list[Finding]) -> list[Finding]:
    rows = [row for row in findings if row.severity == "problem"]
    assert all(row.mend for row in rows)
    return rows


# Kernels


def test_kernels_that_pass(tmp_path: Path) -> None:
    findings = kernels.check(declared(REFERENCE, FAST), {"reference.torch": GOOD, "acme.fast": GOOD}, tmp_path)
    assert [row.severity for row in findings] == ["ok", "ok"]
    assert findings[0].text == "acme.fast passes its self-test (0.2 s)"


@pytest.mark.parametrize(
    ("outcome", "severity", "text"),
    [
        (WRONG, "problem", "it is wrong"),
        (Outcome((), "was ended by SIGILL (an instruction)", "stack"), "problem", "SIGILL"),
        (Outcome((), "was still running after 3 s"), "problem", "still running after 3 s"),
        (Outcome(), "problem", "left with exit status 0"),
        (GOOD._replace(ended="was ended by SIGSEGV"), "problem", "then was ended by SIGSEGV"),
        (Outcome((("passed", {"was_tested": False, "seconds": 1.0, "was_serial": False}),)), "note", "not checked"),
        (None, "note", "was not tested"),
    ],
)
def test_ends_of_a_self_test(tmp_path: Path, outcome: Outcome | None, severity: str, text: str) -> None:
    outcomes = {} if outcome is None else {"acme.fast": outcome}
    finding = kernels.check(declared(FAST), outcomes, tmp_path)[0]
    assert finding.severity == severity
    assert text in finding.text
    assert ("export INT8MOE_DISABLE_PLUGINS=acme" in finding.mend) == (severity == "problem")
    if outcome is not None and outcome.stderr:
        assert finding.details == outcome.stderr


def test_only_the_reference_where_a_plugin_would_help(tmp_path: Path) -> None:
    """A hint, or an installed kernel whose features the system lists; not a kernel for another machine."""
    hint = "this machine is x: acme-kernels has kernels for it (from a checkout: pip install ./plugins/acme)"
    (finding,) = problems(kernels.check(declared(REFERENCE, hints=(hint,)), {"reference.torch": GOOD}, tmp_path))
    assert finding.mend == hint

    (tmp_path / "cpuinfo").write_text("flags : zvx9\n")
    (finding,) = problems(kernels.check(declared(REFERENCE, REFUSED), {"reference.torch": GOOD}, tmp_path))
    assert "libacme.so is missing" in finding.text
    assert "acme-kernels" in finding.mend

    (tmp_path / "cpuinfo").write_text("flags : zvx8\n")
    findings = kernels.check(declared(REFERENCE, REFUSED), {"reference.torch": GOOD}, tmp_path)
    assert not problems(findings)
    assert findings[-1].severity == "note"
    (tmp_path / "cpuinfo").write_text("flags : zvx9\n")
    assert not problems(kernels.check(declared(REFERENCE, REFUSED, FAST), {"acme.fast": GOOD}, tmp_path))


# Versions


def torch_outcome(**fields: Any) -> Outcome:
    reading = {"version": "2.13.0+cpu", "cuda": None, "folder": "/env/torch", "has_parallel_for": True}
    return Outcome((("torch", {**reading, **fields}),))


def test_versions_of_this_environment() -> None:
    findings = versions.check(torch_outcome())
    assert {row.severity for row in findings} == {"ok"}
    lines = [row.text for row in findings]
    assert lines[0].startswith("CPython") or "Py" in lines[0]
    assert any(f"pluggy {metadata.version('pluggy')}" in line for line in lines)
    assert lines[-1] == "torch 2.13.0+cpu, no CUDA build (/env/torch)"
    assert "a CUDA 13.0 build" in versions.check(torch_outcome(cuda="13.0"))[-1].text


@pytest.mark.parametrize(
    ("outcome", "text", "details"),
    [
        (Outcome((("failed", {"text": "ImportError: libx.so", "traceback": "Traceback"}),)), "libx.so", "Traceback"),
        (Outcome((), "was ended by SIGILL", "stack"), "SIGILL", "stack"),
        (torch_outcome(version="2.9.1", has_parallel_for=False), "no torch_parallel_for", ""),
        (torch_outcome()._replace(ended="was ended by SIGSEGV"), "SIGSEGV", ""),
    ],
)
def test_torch_in_trouble(outcome: Outcome, text: str, details: str) -> None:
    (finding,) = problems(versions.check(outcome))
    assert text in finding.text
    assert "torch" in finding.mend
    assert finding.details == details


@pytest.mark.parametrize("version", [None, "0.1"])
def test_a_requirement_that_is_not_met(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    """Pluggy is too old, or has no metadata at all."""
    real = metadata.version

    def fake(name: str) -> str:
        if name != "pluggy":
            return real(name)
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", fake)
    (finding,) = problems(versions.check(torch_outcome()))
    assert "pluggy" in finding.text
    assert finding.mend.startswith('pip install "pluggy>=')


# Variables

PLUGINS = {"reference", "acme"}
TESTED = {"reference.torch": GOOD}


def examined(
    monkeypatch: pytest.MonkeyPatch,
    discovery: Discovery | None = None,
    self_tests: dict[str, Outcome] | None = None,
    **env: str,
) -> list[Finding]:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    invalid = variables.invalid_variables(PLUGINS)
    return variables.check(
        discovery or declared(REFERENCE, FAST),
        {**TESTED, "acme.fast": GOOD} if self_tests is None else self_tests,
        invalid,
        PLUGINS,
    )


def test_no_variable_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    (finding,) = examined(monkeypatch)
    assert finding.severity == "ok"
    assert "INT8MOE_KERNEL" in finding.text


def test_each_variable_has_its_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = examined(
        monkeypatch, INT8MOE_KERNEL="acme.fast", INT8MOE_NUM_THREADS="2", INT8MOE_LOG="info", INT8MOE_STRICT=""
    )
    assert {row.severity for row in findings} == {"ok"}
    assert "INT8MOE_NUM_THREADS=2: workers per parallel region" in [row.text for row in findings]
    assert "INT8MOE_STRICT is empty, as if unset" in [row.text for row in findings]


@pytest.mark.parametrize(
    ("env", "text", "mend"),
    [
        ({"INT8MOE_KERNELL": "x"}, "did you mean INT8MOE_KERNEL", "unset INT8MOE_KERNELL"),
        ({"INT8MOE_STRICT": "maybe"}, "set it to 1 or 0", "unset INT8MOE_STRICT"),
        ({"INT8MOE_NUM_THREADS": "0"}, "from 1 to 4096", "unset INT8MOE_NUM_THREADS"),
        ({"INT8MOE_LOG": "loud"}, "debug, info", "unset INT8MOE_LOG"),
        ({"INT8MOE_PLUGINS": "acne"}, "did you mean acme?", "unset INT8MOE_PLUGINS"),
        ({"INT8MOE_PLUGINS": "acme,reference", "INT8MOE_DISABLE_PLUGINS": "acme"}, "both name acme", "take acme out"),
    ],
)
def test_bad_variables(monkeypatch: pytest.MonkeyPatch, env: dict[str, str], text: str, mend: str) -> None:
    (finding,) = problems(examined(monkeypatch, **env))
    assert text in finding.text
    assert finding.mend.startswith(mend)


def test_a_blocked_plugin_that_is_absent_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = examined(monkeypatch, INT8MOE_DISABLE_PLUGINS="acne")
    assert [row.severity for row in findings] == ["ok", "note"]


@pytest.mark.parametrize(
    ("discovery", "self_tests", "text"),
    [
        (declared(REFERENCE, REFUSED), TESTED, "cannot be used: libacme.so is missing"),
        (
            declared(REFERENCE, FAST._replace(refusal="is above INT8MOE_MAX_ISA=slow")),
            TESTED,
            "cannot be used: is above INT8MOE_MAX_ISA=slow",
        ),
        (declared(REFERENCE, pinned_fault="no kernel is called 'acme.fast'"), TESTED, "no kernel is called"),
        (declared(REFERENCE, FAST), {**TESTED, "acme.fast": WRONG}, "does not pass its self-test"),
        (
            declared(REFERENCE, ended_plugins=(EndedPlugin("acme", "acme-kernels", "was ended by SIGILL", ""),)),
            TESTED,
            "whose plugin ends the process",
        ),
    ],
)
def test_a_pinned_kernel_that_cannot_serve(
    monkeypatch: pytest.MonkeyPatch, discovery: Discovery, self_tests: dict[str, Outcome], text: str
) -> None:
    (finding,) = problems(examined(monkeypatch, discovery, self_tests, INT8MOE_KERNEL="acme.fast"))
    assert text in finding.text
    assert finding.mend == "unset INT8MOE_KERNEL, or name one that passes: reference.torch"


def test_a_pinned_kernel_that_is_outranked_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = examined(monkeypatch, INT8MOE_KERNEL="reference.torch")
    assert [row.severity for row in findings] == ["ok", "note"]
    assert "acme.fast" in findings[1].text


def test_highest_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    capped = declared(REFERENCE, FAST._replace(refusal="is above INT8MOE_MAX_ISA=slow"))
    assert "holds back acme.fast" in examined(monkeypatch, capped, INT8MOE_MAX_ISA="slow")[-1].text
    unknown = declared(REFERENCE, max_isa_fault="INT8MOE_MAX_ISA='slow' is on no plugin's ladder")
    (finding,) = problems(examined(monkeypatch, unknown, INT8MOE_MAX_ISA="slow"))
    assert "ladder" in finding.text


def test_probes_run_without_what_would_end_them(monkeypatch: pytest.MonkeyPatch) -> None:
    env = {"INT8MOE_STRICT": "1", "INT8MOE_PLUGINS": "acne", "INT8MOE_KERNEL": "acme.fast", "OTHER": "stays"}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    left = variables.probe_environment(variables.invalid_variables(PLUGINS))
    assert {name: left.get(name) for name in env} == {
        "INT8MOE_STRICT": None, "INT8MOE_PLUGINS": None, "INT8MOE_KERNEL": "acme.fast", "OTHER": "stays"
    }  # fmt: skip
