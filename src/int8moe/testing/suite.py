"""The conformance suite for pytest.

A plugin's test file adopts it in three lines::

    from int8moe.testing.suite import *  # noqa: F403

    kernel = "acme.fast"

``kernel`` may be a list of names; ``--int8moe-kernel NAME`` overrides it. ``--int8moe-grid`` chooses how many
combinations, or ``grid = "reduced"`` in the file. ``-k "acme.fast and packing"`` runs one group. A kernel that
cannot run on this machine is skipped with its reason.
"""

from __future__ import annotations

import pytest

from ..listing import list_kernels
from ..registry import get_registry
from .case import Case, CaseSkipped, Grid
from .groups import collect_cases
from .target import Target

__all__ = ["pytest_generate_tests", "test_conformance"]

_targets: dict[tuple[str, int], Target] = {}


def _target(name: str) -> Target:
    """Return one Target per kernel, made anew when another provider of that name was registered."""
    key = name, id(get_registry().find(name).spec)
    if key not in _targets:
        _targets[key] = Target(name)
    return _targets[key]


def _names(metafunc: pytest.Metafunc) -> list[str]:
    given = metafunc.config.getoption("int8moe_kernel", default=None)
    if given:
        return list(given)
    declared = getattr(metafunc.module, "kernel", None)
    if isinstance(declared, str):
        return [declared]
    if isinstance(declared, (list, tuple)) and all(isinstance(name, str) for name in declared):
        return list(declared)
    raise pytest.UsageError(
        f'{metafunc.module.__name__}: kernel = {declared!r}; write "<namespace>.<kernel>", or a list of such names'
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test of each case of each kernel."""
    if "int8moe_case" not in metafunc.fixturenames:
        return
    grid: Grid = metafunc.config.getoption("int8moe_grid", default=None) or getattr(metafunc.module, "grid", "default")
    refused = {row.name: row.reason for row in list_kernels() if not row.available}
    parameters = []
    for name in _names(metafunc):
        if name in refused:
            mark = pytest.mark.skip(reason=f"kernel {name}: {refused[name]}")
            parameters.append(pytest.param(name, None, id=f"{name}-unavailable", marks=mark))
            continue
        parameters += [pytest.param(name, case, id=f"{name}-{case.id}") for case in collect_cases(grid)]
    metafunc.parametrize(("int8moe_name", "int8moe_case"), parameters)


def test_conformance(int8moe_name: str, int8moe_case: Case) -> None:
    """Run one case of the conformance suite."""
    try:
        int8moe_case.run_on(_target(int8moe_name))
    except CaseSkipped as reason:
        pytest.skip(f"kernel {int8moe_name}: {reason}")
