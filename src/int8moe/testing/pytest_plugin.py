"""The pytest plugin that comes with int8moe: two options, and a line in the summary.

It is loaded in every pytest run where int8moe is installed, so it imports nothing heavy.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from typing import Any

import pytest

_PROPERTY = "int8moe_comparisons"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the conformance suite."""
    group = parser.getgroup("int8moe")
    group.addoption(
        "--int8moe-kernel",
        action="append",
        dest="int8moe_kernel",
        metavar="NAME",
        help="run the int8moe conformance suite over this kernel; may be repeated",
    )
    group.addoption(
        "--int8moe-grid",
        choices=("reduced", "default", "all"),
        dest="int8moe_grid",
        default=None,
        help="how many combinations the int8moe conformance suite tries",
    )


def _comparisons() -> int:
    bits = sys.modules.get("int8moe.testing.bits")
    return 0 if bits is None else int(bits.comparisons())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Count the bit-exact comparisons of a test; the number travels in its report, through xdist too."""
    before = _comparisons()
    try:
        return (yield)
    finally:
        made = _comparisons() - before
        if made:
            item.user_properties.append((_PROPERTY, made))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how many comparisons were made, and which kernels were left out and why."""
    made = 0
    skipped: dict[str, str] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) == "call":
                made += sum(value for name, value in report.user_properties if name == _PROPERTY)
            nodeid = getattr(report, "nodeid", "")
            if getattr(report, "skipped", False) and nodeid.endswith("-unavailable]"):
                reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
                name, _, why = reason.removeprefix("Skipped: ").removeprefix("kernel ").partition(": ")
                skipped[name] = why
    if made == 0 and not skipped:
        return
    left_out = "; ".join(f"{name}: {why}" for name, why in sorted(skipped.items())) or "none"
    terminalreporter.write_sep("=", "int8moe")
    terminalreporter.write_line(f"int8moe: {made} bit-exact comparisons; skipped kernels: {left_out}")
