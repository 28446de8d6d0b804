"""The CPU's feature words as the system lists them, against what each plugin's own probe found."""

from __future__ import annotations

import platform
from pathlib import Path

from ..host import feature_words
from .discovery import Discovery, KernelReading
from .finding import Finding, note, ok
from .mends import reinstall

CHECK = "cpu"


def check(discovery: Discovery, proc: Path) -> list[Finding]:
    """A line for each kernel that needs features; where the probe refuses what the system lists, a note.

    Args:
        discovery: what the plugins declare.
        proc: where procfs is mounted.
    """
    words = feature_words(proc)
    text = f"{platform.machine()} {platform.system()}; the system lists {len(words) or 'no'} feature words"
    first = ok(CHECK, text) if words else note(CHECK, text, f"mount {proc}: kernels that need features are refused")
    return [first, *(_readings(kernel, words) for kernel in discovery.kernels if kernel.isa)]


def lists_features(kernel: KernelReading, words: frozenset[str]) -> bool:
    """Whether the system lists one of the kernel's feature sets, or it needs none."""
    return not kernel.isa or any(words.issuperset(features) for features in kernel.isa)


def _readings(kernel: KernelReading, words: frozenset[str]) -> Finding:
    sets = " or ".join(" + ".join(features) for features in kernel.isa)
    if lists_features(kernel, words):
        system = f"the system lists {sets}"
        if kernel.unavailable is None:
            return ok(CHECK, f"{kernel.name}: {system}, and the plugin's probe agrees")
        return note(
            CHECK,
            f"{kernel.name}: {system}, but the plugin's probe says: {kernel.unavailable}",
            "the probe decides. A hypervisor may show features whose registers it does not enable; if a library is "
            f"named, {reinstall(kernel.distribution)}",
        )
    closest = min(kernel.isa, key=lambda features: len(set(features) - words))
    system = f"the system does not list {', '.join(word for word in closest if word not in words)}"
    # A probe need not look at what the system lists, so that one which is content tells nothing against the system.
    if kernel.unavailable is None:
        text = "finds nothing else missing. On a CPU that has them, a newer system kernel may list these features"
    else:
        text = f"says: {kernel.unavailable}"
    return ok(CHECK, f"{kernel.name}: {system}; the plugin's probe {text}")
