"""The kernels' own code on CPU tensors, through Triton's interpreter: the bits of the reference.

    TRITON_INTERPRET=1 pytest plugins/triton_gpu/tests/test_triton_interpreter.py

The conformance suite, reduced: with one thread count (the interpreter has no threads), and in groups that say
something about device code. Three kinds of cases take a minute each here and are left to a device: sums over the longest
rows that the contract allows (the accumulator's type is seen in the machine code), sweeps that need 700 experts, which
test_functions makes on the functions themselves, and a routing over hundreds of experts.
"""

from __future__ import annotations

import math

import pytest
import torch

from int8moe import reference
from int8moe.contracts import ACTIVATIONS, MoEConfig
from int8moe.errors import ConfigError, WeightLayoutError
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

import triton
import triton.language as tl
from interpreter_patches import skip_needless_searches

from int8moe_triton_gpu import experts, forward
from int8moe_triton_gpu.kernels.elementary import activate
from int8moe_triton_gpu.tiles import default_steps

skip_needless_searches()

KERNEL = "triton_gpu.grouped_gemm"
GROUPS = ("declaration", "integers", "bits", "routing", "batch", "strides", "special", "rows")

# Slow where code is interpreted. batch-alone with 17 tokens runs, with 100 it is the same in more calls.
LEFT_OUT = (
    "integers-longest",
    "special-sweep",
    "routing-many-experts",
    "batch-alone-small-M100",
    "batch-alone-odd-M100",
)

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


@triton.jit
def activate_kernel(gate_ptr, up_ptr, out_ptr, alpha, limit, ACTIVATION: tl.constexpr, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(out_ptr + at, activate(tl.load(gate_ptr + at), tl.load(up_ptr + at), alpha, limit, ACTIVATION))


def arguments() -> torch.Tensor:
    """2**15 arguments: a dense grid, random bits of every exponent, NaN and Inf, denormals, the edges of exp."""
    edges = torch.tensor(
        [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-40, 7.0, 7.0000005, 88.72, 88.73, 89.1, -104.1]
    )
    random = torch.randint(-(2**31), 2**31, (20_000,), generator=torch.Generator().manual_seed(5), dtype=torch.int64)
    floats = random.to(torch.int32).view(torch.float32)
    return torch.cat([edges, floats, torch.linspace(-110, 110, 2**15 - 20_000 - len(edges))])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_functions(activation: str) -> None:
    gate = arguments()
    up = gate.flip(0).contiguous()
    out = torch.empty_like(gate)
    activate_kernel[(1,)](gate, up, out, 1.702, 7.0, ACTIVATION=activation, COUNT=len(gate))
    halves = (gate,) if activation.endswith("_no_mul") else (gate, up)
    assert_same_bits(out, reference.activate(*halves, activation=activation))


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


@pytest.mark.parametrize("which", ["weights", "ids"])
def test_offsets_of_any_stride_have_64_bits(which: str) -> None:
    """A slot's number times its stride is beyond 2**31. The memory between is never touched, and takes none."""
    config = CONFIG.model_copy(update={"has_bias": False})
    stride = 1_500_000_000
    weights_of_layer = make_experts(config)
    x = make_hidden_states(5, config.hidden_size, dtype=torch.float32)
    plain = dict(zip(("weights", "ids"), make_routing(5, config.num_experts, config.top_k), strict=True))
    wide = torch.empty((config.top_k - 1) * stride + 5, dtype=plain[which].dtype).as_strided(
        (5, config.top_k), (1, stride)
    )
    wide.copy_(plain[which])
    layer = make_layer(config, kernel=KERNEL, experts=weights_of_layer)
    with torch.no_grad():
        actual = layer(x, *(plain | {which: wide}).values())
    assert_same_bits(
        actual, reference_output(config, weights_of_layer, x, **{f"topk_{k}": v for k, v in plain.items()})
    )


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


def test_tuned_tiles_that_cannot_be_read_are_an_error_of_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of the first call, when requests wait."""

    def damaged(*shape: object) -> None:
        raise ConfigError("tiles.json: not a file of tuned tiles")

    monkeypatch.setattr(experts, "steps_for", damaged)
    with pytest.raises(WeightLayoutError, match="not a file of tuned tiles"):
        make_layer(CONFIG, kernel=KERNEL)


def test_tuned_tiles_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tile of the device families, on the interpreter."""
    for family in ("sm_80", "sm_90", "gfx942"):
        monkeypatch.setattr(experts, "steps_for", lambda *shape, family=family: default_steps(family))
        for tokens in (2, 30):
            actual, expected = outputs(CONFIG, tokens, torch.float32)
            assert_same_bits(actual, expected, f"{family}, {tokens} tokens")
