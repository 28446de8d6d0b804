"""The reference against arithmetic that shares no code with it: int64, float64, Python, numpy scalars."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from int8moe import MoEConfig, elementary, reference
from int8moe.testing import assert_same_bits, make_experts, make_hidden_states, make_routing, reference_output, threads

INF, NAN = math.inf, math.nan
FLT_MAX = torch.finfo(torch.float32).max


def f32(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def from_bits(*bits: int) -> torch.Tensor:
    return torch.tensor([b - (1 << 32) if b >> 31 else b for b in bits], dtype=torch.int32).view(torch.float32)


def random_bits(count: int, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (count,), generator=g, dtype=torch.int64).to(torch.int32).view(torch.float32)


# ---- integer products ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "columns", "depth"), [(1, 1, 1), (3, 5, 7), (17, 33, 129), (2, 3, 2049), (4, 4, 5000)]
)
def test_integer_product_is_exact(rows, columns, depth):
    g = torch.Generator().manual_seed(depth)
    q = torch.randint(-127, 128, (rows, depth), generator=g, dtype=torch.int8)
    w = torch.randint(-128, 128, (columns, depth), generator=g, dtype=torch.int8)
    expected = (q.to(torch.int64) @ w.to(torch.int64).t()).to(torch.int32)
    assert_same_bits(reference.integer_matmul(q, w), expected)


def test_cancellation_above_two_to_the_24():
    """Partial sums pass 2**24 and cancel to a small exact sum, which fp32 would lose."""
    depth = 2049
    q = torch.full((1, depth), 127, dtype=torch.int8)
    w = torch.full((3, depth), 127, dtype=torch.int8)
    w[:, depth // 2 :] = -127
    w[:, -1] = torch.tensor([1, 0, -128], dtype=torch.int8)
    partial = 127 * 127 * (depth // 2)
    assert partial < 2**24 < 2 * partial
    w[:, : depth // 2 + 100] = 127
    w[:, depth // 2 + 100 : 2 * (depth // 2)] = -127
    expected = (q.to(torch.int64) @ w.to(torch.int64).t()).to(torch.int32)
    assert_same_bits(reference.integer_matmul(q, w), expected)


@pytest.mark.parametrize("weight", [-128, 127])
@pytest.mark.parametrize("activation", [-127, 127])
def test_longest_reduction(weight, activation):
    q = torch.full((1, 65_793), activation, dtype=torch.int8)
    w = torch.full((1, 65_793), weight, dtype=torch.int8)
    assert reference.integer_matmul(q, w).item() == 65_793 * weight * activation
    assert 65_793 * 127 * 257 < 2**31


# ---- exp, tanh, erf and the activations ------------------------------------------------------------------


def grid(low: float, high: float, count: int = 200_001) -> torch.Tensor:
    return torch.linspace(low, high, count, dtype=torch.float64).to(torch.float32)


def test_exp_relative_error():
    x = grid(-87.3, 88.7, 1_000_001)
    exact = torch.exp(x.double())
    error = ((elementary.exp(x).double() - exact) / exact).abs().max()
    assert error <= 4e-7


def test_exp_of_small_arguments():
    g = torch.Generator().manual_seed(1)
    x = torch.randn(100_000, generator=g) * torch.rand(100_000, generator=g).mul(-60).exp()
    exact = torch.exp(x.double())
    assert ((elementary.exp(x).double() - exact) / exact).abs().max() <= 4e-7


def test_exp_where_the_result_is_denormal():
    x = grid(-104, -87.3)
    exact = torch.exp(x.double())
    # Half a unit of the smallest denormal for the one rounding, and the polynomial's own error.
    assert ((elementary.exp(x).double() - exact).abs() <= 2.0**-150 * 1.01 + 4e-7 * exact).all()


def test_exp_at_its_ends():
    x = f32(0.0, -0.0, INF, -INF, NAN, 88.722, 88.73, 1e30, FLT_MAX, -103.97, -104.0, -105.0, -FLT_MAX, 1e-45)
    got = elementary.exp(x)
    assert got[:2].tolist() == [1.0, 1.0]
    assert got[2] == INF
    assert got[3] == 0
    assert math.isnan(got[4])
    assert math.isfinite(got[5])
    assert got[6:9].tolist() == [INF] * 3
    assert got[9] == 2.0**-149
    assert got[10:13].tolist() == [0.0] * 3
    assert got[13] == 1.0


def test_exp_is_monotone_where_it_steps_between_powers_of_two():
    steps = torch.arange(-150, 129, dtype=torch.float64) * math.log(2)
    x = torch.cat([(s + torch.arange(-20, 21) * 2.0**-20).to(torch.float32) for s in steps])
    x = x.sort().values
    y = elementary.exp(x)
    assert (y[1:] >= y[:-1] * (1 - 2.0**-22)).all()


@pytest.mark.parametrize(
    ("function", "exact"),
    [
        (elementary.silu, lambda x: x / (1 + torch.exp(-x))),
        (elementary.gelu, lambda x: 0.5 * x * (1 + torch.erf(x * math.sqrt(0.5)))),
        (
            elementary.gelu_tanh,
            lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        ),
    ],
    ids=["silu", "gelu", "gelu_tanh"],
)
def test_activation_absolute_error(function, exact):
    x = grid(-30, 30, 600_001)
    assert (function(x).double() - exact(x.double())).abs().max() <= 2e-6


def test_tanh_and_erf():
    x = grid(-20, 20)
    assert (elementary.tanh(x).double() - torch.tanh(x.double())).abs().max() <= 3e-7
    assert (elementary.erf(x).double() - torch.erf(x.double())).abs().max() <= 5e-7
    ends = f32(INF, -INF, NAN, 0.0, -0.0)
    for function in (elementary.tanh, elementary.erf):
        got = function(ends)
        assert got[:2].tolist() == [1.0, -1.0]
        assert math.isnan(got[2])
        assert_same_bits(got[3:].abs() < 1e-6, torch.tensor([True, True]))
        assert_same_bits(torch.signbit(got[3:]), torch.tensor([False, True]))


def test_swigluoai_against_float64():
    gate, up = grid(-30, 30, 40_001), grid(30, -30, 40_001) + 0.25
    for alpha, limit in ((1.702, 7.0), (1.0, 0.5), (2.5, 100.0)):
        g, u = gate.double().clamp(max=limit), up.double().clamp(-limit, limit)
        exact = (u + 1) * g / (1 + torch.exp(-alpha * g))
        error = (elementary.swigluoai(gate, up, alpha, limit).double() - exact).abs()
        assert (error <= 1e-6 * exact.abs() + 2e-6).all()


def test_relu2_and_ungated_forms():
    d = f32(-1.0, -0.0, 0.0, 3.0, INF, -INF, NAN, 1e30)
    got = reference.activate(d, activation="relu2_no_mul")
    assert got[:6].tolist() == [0.0, 0.0, 0.0, 9.0, INF, 0.0]
    assert math.isnan(got[6])
    assert got[7] == INF
    for name in ("silu", "gelu", "gelu_tanh"):
        assert_same_bits(reference.activate(d, activation=f"{name}_no_mul"), getattr(reference, name)(d))


def test_activations_at_the_ends():
    d = f32(INF, -INF, NAN, FLT_MAX, -FLT_MAX, 100.0, -100.0)
    silu, gelu, gelu_tanh = (f(d) for f in (reference.silu, reference.gelu, reference.gelu_tanh))
    for got in (silu, gelu, gelu_tanh):
        assert got[0] == INF
        assert math.isnan(got[2])
        assert got[5] == 100.0
    assert math.isnan(silu[1])  # -inf / inf, as the formula says
    assert silu[6] == 0.0
    # NaN passes through min and clamp (x86 minps would lose it).
    assert torch.isnan(reference.swigluoai(f32(NAN, 1.0), f32(1.0, NAN), 1.702, 7.0)).all()


# ---- Q ---------------------------------------------------------------------------------------------------


def quantize(*values: float) -> tuple[list[int], float]:
    q, s = reference.quantize_rows(f32(*values).reshape(1, -1))
    assert q.dtype == torch.int8
    assert s.dtype == torch.float32
    return q[0].tolist(), s.item()


def test_half_to_even():
    values = [127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, -126.5]
    assert quantize(*values) == ([127, 0, 2, 2, 0, -2, -2, 126, -126], 1.0)


def test_zero_rows():
    assert quantize(0.0, -0.0, 0.0) == ([0, 0, 0], 0.0)


@pytest.mark.parametrize("bad", [NAN, INF, -INF, -NAN])
def test_rows_with_nan_or_inf(bad):
    q, s = quantize(1.0, bad, -3.0)
    assert q == [0, 0, 0]
    assert math.isnan(s)


def test_rows_below_the_smallest_amax():
    edge = f32(127.0).div(f32(FLT_MAX)).item()
    assert quantize(edge * 0.5, -edge * 0.25) == ([0, 0], 0.0)
    assert quantize(1e-45) == ([0], 0.0)
    q, s = quantize(edge * 1.01, -edge * 1.01)
    assert q == [127, -127]
    assert s > 0
    # The rule is "127 / amax is not finite", bit by bit around the edge.
    bits = f32(edge).view(torch.int32).item()
    for b in range(bits - 4, bits + 5):
        amax = torch.tensor([b], dtype=torch.int32).view(torch.float32)
        live = math.isfinite(torch.div(f32(127.0), amax).item())
        assert quantize(amax.item())[0] == ([127] if live else [0])


def test_the_largest_row():
    assert quantize(FLT_MAX, -FLT_MAX)[0] == [127, -127]


def test_the_division_trap():
    """127 / amax is one IEEE division; reciprocal() * 127 differs in a quarter of the values."""
    g = torch.Generator().manual_seed(2)
    amax = torch.rand(20_000, generator=g) * 10 + 0.1
    exact = torch.from_numpy((np.float32(127) / amax.numpy()).astype(np.float32))
    wrong = torch.reciprocal(amax) * 127
    trapped = exact != wrong
    assert 0.1 < trapped.float().mean() < 0.5
    # A second entry at a half-way place between the two inverses tells which one was taken.
    second = torch.linspace(0.001, 0.999, 20_000) * amax
    rows = torch.stack([amax, second], dim=1)
    q, s = reference.quantize_rows(rows)
    expected = np.rint(rows.numpy() * exact.numpy()[:, None]).clip(-127, 127).astype(np.int8)
    assert_same_bits(q, torch.from_numpy(expected))
    assert_same_bits(s, torch.from_numpy((amax.numpy() / np.float32(127)).astype(np.float32)))


def test_quantize_any_bits():
    """Random bit patterns, NaN, Inf and denormals among them, against numpy float32."""
    rows = random_bits(40_000, seed=3).reshape(-1, 4)
    q, s = reference.quantize_rows(rows)
    values = rows.numpy()
    with np.errstate(all="ignore"):
        amax = np.abs(values).max(axis=1)  # NaN wins in numpy's max
        inverse = (np.float32(127) / amax).astype(np.float32)
        dead = (amax == 0) | ~np.isfinite(inverse)
        expected_q = np.rint(values * inverse[:, None])
        expected_s = (amax / np.float32(127)).astype(np.float32)
    expected_s[dead] = 0
    bad = ~np.isfinite(amax)
    expected_s[bad] = np.nan
    expected_q[dead | bad] = 0
    assert_same_bits(q, torch.from_numpy(expected_q.clip(-127, 127).astype(np.int8)))
    assert_same_bits(s, torch.from_numpy(expected_s))


# ---- rounding of the output ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_output_rounding_is_torchs_on_any_bits(dtype):
    values = torch.cat(
        [
            random_bits(200_000, seed=4),
            random_bits(50_000, seed=5).view(torch.int32).bitwise_and(-2139095041).view(torch.float32),  # denormals
            f32(0.0, -0.0, INF, -INF, NAN, FLT_MAX, -FLT_MAX, 65504.0, 65519.99, 65520.0, 3.3895314e38, 1e-39),
            from_bits(0x3F808000, 0x3F818000, 0x3F808001, 0x7F7F8000, 0x7F7F7FFF, 0x00008000, 0x00018000, 0x7F800001),
        ]
    )
    assert_same_bits(reference.round_to_dtype(values, dtype), values.to(dtype))


def test_bfloat16_denormals_stay():
    assert reference.round_to_dtype(f32(1e-39), torch.bfloat16).item() != 0
    assert reference.round_to_dtype(from_bits(0x8000), torch.bfloat16).view(torch.int16).item() == 0
    assert reference.round_to_dtype(from_bits(0x8001), torch.bfloat16).view(torch.int16).item() == 1
    assert reference.round_to_dtype(from_bits(0x18000), torch.bfloat16).view(torch.int16).item() == 2


# ---- threads, modes, arguments -----------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3])
def test_threads_change_no_bit(count):
    config = MoEConfig(num_experts=4, top_k=2, hidden_size=129, intermediate_size=257)
    experts = make_experts(config, seed=18)
    inputs = make_hidden_states(300, 129, seed=19), *make_routing(300, 4, 2, seed=20)
    with threads(1):
        expected = reference_output(config, experts, *inputs)
    with threads(count):
        assert_same_bits(reference_output(config, experts, *inputs), expected)


def test_refusals():
    config = MoEConfig(num_experts=2, top_k=2, hidden_size=4, intermediate_size=4)
    experts = make_experts(config)
    arguments = (
        torch.zeros(1, 4), experts.w13_weight, experts.w13_weight_scale, experts.w2_weight, experts.w2_weight_scale,
        torch.ones(1, 2), torch.zeros(1, 2, dtype=torch.int32),
    )  # fmt: skip
    with pytest.raises(ValueError, match="sliu"):
        reference.fused_experts(*arguments, activation="sliu")
    with pytest.raises(ValueError, match="top_k"):
        reference.fused_experts(*arguments, apply_router_weight_on_input=True)


def test_trailing_one_of_scales():
    config = MoEConfig(num_experts=2, top_k=2, hidden_size=4, intermediate_size=4)
    experts = make_experts(config)
    inputs = make_hidden_states(3, 4), *make_routing(3, 2, 2)
    expected = reference_output(config, experts, *inputs)
    actual = reference.fused_experts(
        inputs[0],
        experts.w13_weight,
        experts.w13_weight_scale.unsqueeze(-1),
        experts.w2_weight,
        experts.w2_weight_scale.unsqueeze(-1),
        *inputs[1:],
    )
    assert_same_bits(actual, expected)
