"""The conformance suite, and what a kernel's own tests need. Importing this package imports no torch.

A plugin adopts the whole suite in three lines of a test file::

    from int8moe.testing.suite import *  # noqa: F403

    kernel = "acme.fast"

The same cases run without pytest by ``int8moe verify NAME`` (``python -m int8moe.testing NAME``).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .bits import assert_matches, assert_same_bits, comparisons, same_bits
    from .case import Case, CaseSkipped
    from .groups import GROUPS, collect_cases
    from .makers import (
        Experts,
        make_experts,
        make_hidden_states,
        make_layer,
        make_routing,
        reference_output,
        threads,
    )
    from .narrowing import Narrowing
    from .runner import run_kernel
    from .target import Target
    from .under_test import skip_kernel

_HOME = {
    "Case": "case",
    "CaseSkipped": "case",
    "Experts": "makers",
    "GROUPS": "groups",
    "Narrowing": "narrowing",
    "Target": "target",
    "assert_matches": "bits",
    "assert_same_bits": "bits",
    "collect_cases": "groups",
    "comparisons": "bits",
    "make_experts": "makers",
    "make_hidden_states": "makers",
    "make_layer": "makers",
    "make_routing": "makers",
    "reference_output": "makers",
    "run_kernel": "runner",
    "same_bits": "bits",
    "skip_kernel": "under_test",
    "threads": "makers",
}

__all__ = [
    "GROUPS",
    "Case",
    "CaseSkipped",
    "Experts",
    "Narrowing",
    "Target",
    "assert_matches",
    "assert_same_bits",
    "collect_cases",
    "comparisons",
    "make_experts",
    "make_hidden_states",
    "make_layer",
    "make_routing",
    "reference_output",
    "run_kernel",
    "same_bits",
    "skip_kernel",
    "threads",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
