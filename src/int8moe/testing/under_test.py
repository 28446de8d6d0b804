"""The kernels that a pytest run is about: which they are, which of them cannot run here, and one Target of each."""

from __future__ import annotations

from typing import NoReturn

import pytest

from ..errors import NoKernelError
from ..listing import list_kernels
from ..registry import get_registry
from .narrowing import WHOLE, Narrowing
from .pytest_plugin import NARROWING, NOT_RUN
from .target import Target

_targets: dict[tuple[str, int, Narrowing], Target] = {}


def kernel_names(metafunc: pytest.Metafunc) -> list[str]:
    """The kernels of ``--int8moe-kernel``; else those that ``kernel`` in the test's module names; each once.

    Where the module names none, or one that does not exist, its collection fails with one line.
    """
    given = metafunc.config.getoption("int8moe_kernel", default=None)
    declared = [declared] if isinstance(declared := getattr(metafunc.module, "kernel", None), str) else declared
    names = given or declared
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        pytest.fail(
            f'{metafunc.module.__name__}: kernel = {declared!r}; write kernel = "<namespace>.<kernel>", or a list of '
            "such names, in the file, or give --int8moe-kernel NAME",
            pytrace=False,
        )
    for name in names:
        try:
            get_registry().find(name)
        except NoKernelError as error:
            raise pytest.fail.Exception(f"int8moe: {error}", pytrace=False) from None
    return list(dict.fromkeys(names))


def refusal(name: str) -> str:
    """Why a kernel cannot run on this machine; "" when it can."""
    return next(row.reason for row in list_kernels() if row.name == name)


def target_of(name: str, config: pytest.Config) -> Target:
    """Return one Target per kernel, made anew when another provider of that name was registered."""
    narrowing = config.stash.get(NARROWING, WHOLE)
    key = name, id(get_registry().find(name).spec), narrowing
    if key not in _targets:
        _targets[key] = Target(name, narrowing=narrowing)
    return _targets[key]


def skip_kernel(node: pytest.Item, name: str, reason: str) -> NoReturn:
    """Skip a test because a kernel cannot run here; the summary of the run names each such kernel once.

    Args:
        node: the test, ``request.node`` of a fixture.
        name: "<namespace>.<kernel>".
        reason: why, in a few words.
    """
    node.user_properties.append((NOT_RUN, f"{name}: {reason}"))
    pytest.skip(f"kernel {name}: {reason}")
