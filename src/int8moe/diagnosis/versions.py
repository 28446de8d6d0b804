"""Python, int8moe and what it is built on."""

from __future__ import annotations

import platform
import sys
from importlib import metadata
from pathlib import Path

from .finding import Finding, note, ok, problem
from .outcome import Outcome, without_import_frames
from .requirements import Required, requirements_of

CHECK = "versions"


def check(torch: Outcome) -> list[Finding]:
    """Versions against what int8moe requires, and torch's build.

    Args:
        torch: outcome of the probe "torch".
    """
    findings = [ok(CHECK, f"{platform.python_implementation()} {platform.python_version()} ({sys.executable})")]
    where = Path(__file__).resolve().parents[1]
    try:
        distribution = metadata.distribution("int8moe")
    except metadata.PackageNotFoundError:
        text = f"int8moe is run from {where} and is not installed, so its requirements are not known"
        findings.append(note(CHECK, text, "pip install -e . (in the checkout)"))
        return [*findings, *_torch(torch, "torch")]
    findings.append(ok(CHECK, f"int8moe {distribution.version} ({where})"))
    requirement = "torch"
    for row in requirements_of(distribution):
        if row.name != "torch":
            findings.append(_requirement(row))
            continue
        requirement = row.text
        if not row.met:
            findings.append(_requirement(row))
            if row.version is None and torch.last("torch") is None:
                return findings  # that it cannot be imported is no news
    return [*findings, *_torch(torch, requirement)]


def _requirement(row: Required) -> Finding:
    if row.met:
        return ok(CHECK, f"{row.name} {row.version} (wanted is {row.text})")
    found = "is not installed" if row.version is None else f"{row.version} is installed"
    return problem(CHECK, f"{row.name} {found}; int8moe needs {row.text}", f'pip install "{row.text}"')


def _torch(outcome: Outcome, requirement: str) -> list[Finding]:
    install = f'pip install --force-reinstall "{requirement}"'
    failed = outcome.last("failed")
    if failed is not None:
        text = f"torch cannot be imported: {failed['text']}"
        return [problem(CHECK, text, install, without_import_frames(failed["traceback"]))]
    found = outcome.last("torch")
    if found is None:
        text = f"torch: the process that imported it {outcome.how_it_ended}"
        return [problem(CHECK, text, f"{install}, of a build that is made for this CPU", outcome.stderr)]
    build = f"a CUDA {found['cuda']} build" if found["cuda"] else "no CUDA build"
    findings = [ok(CHECK, f"torch {found['version']}, {build} ({found['folder']})")]
    if not found["has_parallel_for"]:
        text = f"torch {found['version']} has no torch_parallel_for, so that native kernels run on one thread"
        findings.append(problem(CHECK, text, 'pip install "torch>=2.10"'))
    if outcome.ended:
        text = f"torch: the process that imported it {outcome.ended} when it had done so"
        findings.append(problem(CHECK, text, install, outcome.stderr))
    return findings
