"""The pytest plugin that comes with int8moe: options, two fixtures, and lines in the summary.

It is loaded in every pytest run where int8moe is installed, so it imports nothing heavy.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest

from .case import CaseSkipped

if TYPE_CHECKING:
    from .narrowing import Narrowing
    from .target import Target

NARROWING: pytest.StashKey[Narrowing] = pytest.StashKey()
"""In a config's stash: what the options leave of the suite; absent when that is all."""

NOT_RUN = "int8moe_not_run"
"""Property of a test that is skipped because its kernel cannot run here: "<kernel>: <reason>"."""

_COMPARISONS = "int8moe_comparisons"

# One row an option that may be repeated: metavar, help.
_REPEATED = {
    "kernel": ("NAME", "test this kernel, whatever the test files say"),
    "group": ("NAME", "of the conformance suite, run only this group of cases"),
    "activation": ("NAME", "of the conformance suite, run only this activation"),
    "dtype": ("NAME", "of the conformance suite, run only this dtype of hidden states"),
    "shape": ("HxI", "of the conformance suite, run only layers of this hidden_size x intermediate_size"),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the conformance suite."""
    group = parser.getgroup("int8moe")
    for name, (metavar, text) in _REPEATED.items():
        group.addoption(
            f"--int8moe-{name}",
            action="append",
            dest=f"int8moe_{name}",
            metavar=metavar,
            help=f"{text}; may be repeated",
        )
    group.addoption(
        "--int8moe-grid",
        choices=("reduced", "default", "all"),
        dest="int8moe_grid",
        default=None,
        help="how many combinations the int8moe conformance suite tries",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Read the options that narrow the suite."""
    groups, *words = (config.getoption(f"int8moe_{name}") or [] for name in ("group", "activation", "dtype", "shape"))
    if not groups and not any(words):
        return
    from ..errors import ConfigError
    from .group_names import GROUP_NAMES
    from .narrowing import check_known, parse_narrowing

    try:
        if any(words):
            config.stash[NARROWING] = parse_narrowing(*words)
        for name in groups:
            check_known("group", name, GROUP_NAMES)
    except ConfigError as error:
        raise pytest.UsageError(f"int8moe: {error}") from None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that asks for a kernel once for each; the suite's own module sees to its cases."""
    if "int8moe_kernel" in metafunc.fixturenames and "int8moe_case" not in metafunc.fixturenames:
        from .under_test import kernel_names

        metafunc.parametrize("int8moe_kernel", kernel_names(metafunc), indirect=True)


@pytest.fixture
def int8moe_kernel(request: pytest.FixtureRequest) -> str:
    """Name of each kernel in turn that ``--int8moe-kernel`` gives, or ``kernel = ...`` in the test's module.

    A test of one that cannot run on this machine is skipped with the reason.
    """
    from .under_test import refusal, skip_kernel

    name: str = request.param
    reason = refusal(name)
    if reason:
        skip_kernel(request.node, name, reason)
    return name


@pytest.fixture
def int8moe_target(int8moe_kernel: str, pytestconfig: pytest.Config) -> Target:
    """The kernel as an int8moe.testing.Target: makes layers and inputs for it, and compares with the reference."""
    from .under_test import target_of

    return target_of(int8moe_kernel, pytestconfig)


def _comparisons() -> int:
    bits = sys.modules.get("int8moe.testing.bits")
    return 0 if bits is None else int(bits.comparisons())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Skip a test for which the kernel declares too little, or the options leave nothing; count its comparisons.

    The number of bit-exact comparisons travels in the test's report, through xdist too.
    """
    before = _comparisons()
    try:
        return (yield)
    except CaseSkipped as reason:
        name = getattr(item, "funcargs", {}).get("int8moe_kernel")
        pytest.skip(f"kernel {name}: {reason}" if name else str(reason))
    finally:
        made = _comparisons() - before
        if made:
            item.user_properties.append((_COMPARISONS, made))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say how many comparisons were made, what the options left out, and which kernels did not run and why."""
    made = 0
    not_run: set[str] = set()
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == _COMPARISONS and report.when == "call":
                    made += value
                elif name == NOT_RUN:
                    not_run.add(value)
    if made == 0 and not not_run:
        return
    terminalreporter.write_sep("=", "int8moe")
    terminalreporter.write_line(f"int8moe: {made} bit-exact comparisons")
    narrowing = config.stash.get(NARROWING, None)
    if narrowing is not None:
        terminalreporter.write_line(f"int8moe: only {narrowing}")
    for line in sorted(not_run):
        terminalreporter.write_line(f"int8moe: not run: {line}")
