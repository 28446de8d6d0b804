"""The kernels' own code on CPU tensors, through Triton's interpreter: the bits of the reference.

    TRITON_INTERPRET=1 pytest plugins/triton_gpu/tests/test_interpreter.py

The conformance suite, reduced: with one thread count (the interpreter has no threads), and in groups that say
something about device code. Sums over the longest rows that the contract allows are left to a device: here they take
minutes, and the accumulator's type is seen in the machine code.
"""

from __future__ import annotations

import pytest
import torch

from int8moe.contracts import ACTIVATIONS, MoEConfig
from int8moe.testing import (
    assert_same_bits,
    make_experts,
    make_hidden_states,
    make_layer,
    make_routing,
    reference_output,
)
from int8moe.testing.case import Case, CaseSkipped
from int8moe.testing.groups import collect_cases
from int8moe.testing.target import Target
from int8moe_triton_gpu import probe

pytest.importorskip("triton", reason="triton is not installed (make triton-check installs it)")
if not probe.read_facts().interpreted:
    pytest.skip("needs TRITON_INTERPRET=1 (make triton-check runs both)", allow_module_level=True)

from interpreter_patches import skip_needless_searches

from int8moe_triton_gpu import experts, forward
from int8moe_triton_gpu.tiles import default_steps

skip_needless_searches()

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


CONFIG = MoEConfig(num_experts=5, top_k=3, hidden_size=67, intermediate_size=33, has_bias=True)


def outputs(config: MoEConfig, tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel's result and the reference's; some slots are left out, and one token has none."""
    weights_of_layer = make_experts(config, seed=1)
    layer = make_layer(config, kernel=KERNEL, experts=weights_of_layer)
    x = make_hidden_states(tokens, config.hidden_size, dtype=dtype, seed=2)
    weights, ids = make_routing(tokens, config.num_experts, config.top_k, seed=3, distinct=False)
    ids[0, 0], ids[-1] = -1, -1
    with torch.no_grad():
        return layer(x, weights, ids), reference_output(config, weights_of_layer, x, weights, ids)


@pytest.mark.parametrize("tokens", [1, 9], ids=["a block a slot", "sorted"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_and_dtypes_on_both_paths(activation: str, dtype: torch.dtype, tokens: int) -> None:
    actual, expected = outputs(CONFIG.model_copy(update={"activation": activation}), tokens, dtype)
    assert_same_bits(actual, expected)


def test_chunks_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "SCRATCH_BYTES", 4096)
    actual, expected = outputs(CONFIG, 20, torch.float32)
    assert_same_bits(actual, expected)


@pytest.mark.parametrize(
    "changes", [{"num_experts": 70}, {"num_experts": 1, "top_k": 1}, {"num_experts": 8, "top_k": 8}]
)
def test_numbers_of_experts(changes: dict[str, int]) -> None:
    actual, expected = outputs(CONFIG.model_copy(update=changes), 40, torch.bfloat16)
    assert_same_bits(actual, expected)


def test_tuned_tiles_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tile of the device families, on the interpreter."""
    for family in ("sm_80", "sm_90", "gfx942"):
        monkeypatch.setattr(experts, "steps_for", lambda *shape, family=family: default_steps(family))
        for tokens in (2, 30):
            actual, expected = outputs(CONFIG, tokens, torch.float32)
            assert_same_bits(actual, expected, f"{family}, {tokens} tokens")
