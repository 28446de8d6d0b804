"""The conformance suite for pytest.

A plugin's test file adopts it in three lines::

    from int8moe.testing.suite import *  # noqa: F403

    kernel = "acme.fast"

``kernel`` may be a list of names; ``--int8moe-kernel NAME`` overrides it. ``--int8moe-grid`` chooses how many
combinations, or ``grid = "reduced"`` in the file; ``--int8moe-group`` runs one group of cases, and other options of
:mod:`.pytest_plugin` leave out shapes, dtypes and activations. A kernel that cannot run on this machine is skipped
with its reason.
"""

from __future__ import annotations

import pytest

from .case import Case, Grid
from .groups import collect_cases
from .target import Target
from .under_test import kernel_names, refusal

__all__ = ["pytest_generate_tests", "test_conformance"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test of each case of each kernel."""
    if "int8moe_case" not in metafunc.fixturenames:
        return
    option = metafunc.config.getoption
    grid: Grid = option("int8moe_grid", default=None) or getattr(metafunc.module, "grid", "default")
    groups = option("int8moe_group", default=None)
    parameters = []
    for name in kernel_names(metafunc):
        if refusal(name):  # one test, which its fixture skips
            parameters.append(pytest.param(name, None, id=f"{name}-unavailable"))
            continue
        parameters += [pytest.param(name, case, id=f"{name}-{case.id}") for case in collect_cases(grid, groups)]
    metafunc.parametrize(("int8moe_kernel", "int8moe_case"), parameters, indirect=["int8moe_kernel"])


def test_conformance(int8moe_target: Target, int8moe_case: Case) -> None:
    """Run one case of the conformance suite."""
    int8moe_case.run_on(int8moe_target)
