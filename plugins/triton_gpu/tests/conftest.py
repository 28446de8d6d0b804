from __future__ import annotations

from importlib.util import find_spec

import pytest

from int8moe_triton_gpu import probe

INTERPRETED = probe.read_facts().interpreted

# These files import triton at once, which decides then whether kernels are compiled or interpreted.
_NEEDS = {
    "test_interpreter.py": "interpreter",
    "test_compiled.py": "compiler",
    "test_launches.py": "compiler",
}
collect_ignore = [name for name in _NEEDS if find_spec("triton") is None]


def pytest_report_header() -> str:
    if find_spec("triton") is None:
        return "int8moe-triton-gpu: triton is not installed, what needs it is left out"
    how = "interpreted (TRITON_INTERPRET=1)" if INTERPRETED else "compiled; TRITON_INTERPRET=1 runs the others"
    return f"int8moe-triton-gpu: kernels are {how}"


@pytest.fixture(autouse=True)
def _kernels_as_needed(request: pytest.FixtureRequest) -> None:
    """One process has its kernels either compiled or interpreted."""
    needed = _NEEDS.get(request.node.path.name)
    if needed == "interpreter" and not INTERPRETED:
        pytest.skip("needs TRITON_INTERPRET=1 (make triton-check runs both halves)")
    if needed == "compiler" and INTERPRETED:
        pytest.skip("compiles, which TRITON_INTERPRET=1 forbids (make triton-check runs both halves)")
