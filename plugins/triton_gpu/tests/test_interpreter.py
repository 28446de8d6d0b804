"""The kernels' own code on CPU tensors, through Triton's interpreter: the bits of the reference.

    TRITON_INTERPRET=1 pytest plugins/triton_gpu/tests/test_interpreter.py

The conformance suite, reduced: with one thread count (the interpreter has no threads), and in groups that say
something about device code. Sums over the longest rows that the contract allows are left to a device: here they take
minutes, and the accumulator's type is seen in the machine code.
"""

from __future__ import annotations

import pytest

from int8moe.testing.case import Case, CaseSkipped
from int8moe.testing.groups import collect_cases
from int8moe.testing.target import Target
from int8moe_triton_gpu import probe

pytest.importorskip("triton", reason="triton is not installed (make triton-check installs it)")
if not probe.read_facts().interpreted:
    pytest.skip("needs TRITON_INTERPRET=1 (make triton-check runs both)", allow_module_level=True)

KERNEL = "triton_gpu.grouped_gemm"
GROUPS = ("declaration", "integers", "bits", "routing", "batch", "strides", "special", "rows")

LEFT_OUT = "integers-longest"

pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered", "ignore:invalid value encountered", "ignore:divide by zero encountered"
)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(KERNEL, threads=(1,))


CASES = [case for case in collect_cases("reduced", GROUPS) if not case.id.startswith(LEFT_OUT)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_conformance(target: Target, case: Case) -> None:
    try:
        case.run_on(target)
    except CaseSkipped as reason:
        pytest.skip(str(reason))
