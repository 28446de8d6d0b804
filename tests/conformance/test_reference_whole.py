"""The whole reference against numpy float32 scalars, written from NUMERICS.md, and under flush-to-zero."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from int8moe import MoEConfig
from int8moe.contracts import ACTIVATIONS
from int8moe.testing import assert_same_bits, make_experts, make_hidden_states, make_routing, reference_output

# ---- the whole, against numpy float32 scalars --------------------------------------------------------------

F = np.float32


def slow_exp(x: np.float32) -> np.float32:
    if np.isnan(x):
        return x
    x = min(max(x, F(-104)), F(89))
    n = np.rint(x * F(1.44269504088896341))
    r = (x - n * F(0.693359375)) - n * F(-2.12194440e-4)
    p = F(1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = p * r + F(c)
    p = (p * (r * r) + r) + F(1)
    half = int(n) >> 1
    with np.errstate(over="ignore"):
        return (p * F(2.0**half)) * F(2.0 ** (int(n) - half))


def slow_erf(x: np.float32) -> np.float32:
    z = np.abs(x)
    t = F(1) / (F(0.3275911) * z + F(1))
    p = F(1.061405429)
    for c in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        p = p * t + F(c)
    return np.copysign(F(1) - (p * t) * slow_exp(-(z * z)), x)


def slow_activation(name: str, g: np.float32, u: np.float32 | None, alpha: float, limit: float) -> np.float32:
    if name == "relu2":
        g = max(g, F(0))
        return g * g
    if name == "swigluoai":
        assert u is not None
        g, u = min(g, F(limit)), min(max(u, -F(limit)), F(limit))
        return (u + F(1)) * (g / (F(1) + slow_exp(-(F(alpha) * g))))
    if name == "silu":
        value = g / (F(1) + slow_exp(-g))
    elif name == "gelu":
        value = (F(0.5) * g) * (F(1) + slow_erf(g * F(math.sqrt(0.5))))
    else:
        inner = (g + ((g * g) * g) * F(0.044715)) * F(math.sqrt(2 / math.pi))
        t = slow_exp(F(-2) * np.abs(inner))
        value = (F(0.5) * g) * (F(1) + np.copysign((F(1) - t) / (F(1) + t), inner))
    return value if u is None else value * u


def slow_quantize(row: list[np.float32]) -> tuple[list[int], np.float32]:
    if any(not np.isfinite(r) for r in row):
        return [0] * len(row), F(np.nan)
    amax = max(abs(r) for r in row)
    if amax == 0 or not np.isfinite(F(127) / amax):
        return [0] * len(row), F(0)
    inverse = F(127) / amax
    return [int(min(max(np.rint(r * inverse), F(-127)), F(127))) for r in row], amax / F(127)


def slow_layer(config, experts, x, weights, ids, mapping):
    """Steps 1 to 8 of NUMERICS.md, one scalar at a time; fp32 result."""
    name = config.activation.removesuffix("_no_mul")
    inner, hidden = config.intermediate_size, config.hidden_size
    out = []
    for token in range(len(x)):
        row = [F(v) for v in x[token].float().tolist()]
        router = [F(v) for v in weights[token].float().tolist()]
        if config.apply_router_weight_on_input:
            row, router = [v * router[0] for v in row], [F(1)]
        q, s = slow_quantize(row)
        total = [F(0)] * hidden
        slots = sorted((e, k) for k, e in enumerate(ids[token].tolist()))
        for expert, slot in slots:
            if not 0 <= expert < config.num_experts or mapping[expert] < 0:
                continue
            e = mapping[expert]
            d = []
            for n, w in enumerate(experts.w13_weight[e].tolist()):
                value = (F(sum(a * b for a, b in zip(q, w, strict=True))) * s) * F(
                    experts.w13_weight_scale[e, n].item()
                )
                d.append(value if experts.w13_bias is None else value + F(experts.w13_bias[e, n].item()))
            h = [
                slow_activation(
                    name, d[i], d[inner + i] if config.is_gated else None, config.swiglu_alpha, config.swiglu_limit
                )
                for i in range(inner)
            ]
            q2, s2 = slow_quantize(h)
            for n, w in enumerate(experts.w2_weight[e].tolist()):
                y = (F(sum(a * b for a, b in zip(q2, w, strict=True))) * s2) * F(experts.w2_weight_scale[e, n].item())
                if experts.w2_bias is not None:
                    y = y + F(experts.w2_bias[e, n].item())
                total[n] = total[n] + router[slot] * y
        out.append(total)
    return torch.tensor(np.array(out, dtype=np.float32).reshape(len(x), hidden))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_against_scalars(activation, bias, dtype):
    config = MoEConfig(num_experts=4, top_k=3, hidden_size=7, intermediate_size=5, activation=activation, has_bias=bias)
    experts = make_experts(config, seed=8)
    x = make_hidden_states(5, 7, dtype=dtype, seed=9)
    x[1] = 0
    x[2, 3] = math.nan
    x[4] = 1e-39
    weights, ids = make_routing(5, 4, 3, seed=10, distinct=False)
    ids[0] = torch.tensor([3, 1, 3])
    ids[3] = torch.tensor([-1, 4, 2])
    with np.errstate(all="ignore"):
        expected = slow_layer(config, experts, x, weights, ids, [0, 1, 2, 3])
    assert_same_bits(reference_output(config, experts, x, weights, ids), expected.to(dtype))


def test_order_of_the_sum():
    """Ascending global id, equal ids by slot, also where a map turns local ids round."""
    config = MoEConfig(
        num_experts=6, top_k=6, hidden_size=5, intermediate_size=3, num_local_experts=4, has_expert_map=True
    )
    experts = make_experts(config, seed=11)
    mapping = [3, -1, 2, 1, -1, 0]
    x = make_hidden_states(12, 5, dtype=torch.float32, seed=12)
    weights, ids = make_routing(12, 6, 6, seed=13)
    ids[5:] = make_routing(7, 6, 6, seed=14, distinct=False)[1]
    expected = slow_layer(config, experts, x, weights, ids, mapping)
    actual = reference_output(config, experts, x, weights, ids, expert_map=torch.tensor(mapping))
    assert_same_bits(actual, expected)


def test_router_weight_on_input():
    config = MoEConfig(num_experts=3, top_k=1, hidden_size=6, intermediate_size=4, apply_router_weight_on_input=True)
    experts = make_experts(config, seed=15)
    x = make_hidden_states(6, 6, dtype=torch.bfloat16, seed=16)
    weights, ids = make_routing(6, 3, 1, seed=17)
    weights = torch.tensor([[0.5], [0.3], [-0.7], [1.0], [0.0], [1e-30]])
    kept = x.clone()
    expected = slow_layer(config, experts, x, weights, ids, [0, 1, 2]).to(torch.bfloat16)
    assert_same_bits(reference_output(config, experts, x, weights, ids), expected)
    assert_same_bits(x, kept)


# ---- the caller's floating-point mode ----------------------------------------------------------------------

FLUSHING = """
import sys, torch
from int8moe import MoEConfig
from int8moe.testing import assert_same_bits, make_experts, make_hidden_states, make_routing, reference_output
hidden, inner, tokens = map(int, sys.argv[1:4])
torch.set_num_threads(1)
config = MoEConfig(num_experts=2, top_k=2, hidden_size=hidden, intermediate_size=inner)
experts = make_experts(config)
experts.w2_weight_scale.mul_(1e-39)
work = []
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    x = make_hidden_states(tokens, hidden, dtype=dtype)
    x[0] = torch.finfo(dtype).smallest_normal / 2
    work.append((x, *make_routing(tokens, 2, 2)))
plain = [reference_output(config, experts, *inputs) for inputs in work]
# Workers inherit the mode of the thread that starts them: flushing comes first.
flushes = torch.set_flush_denormal(True)
torch.set_num_threads(int(sys.argv[4]))
torch.set_default_dtype(getattr(torch, sys.argv[5]))
torch.ones(1 << 20).mul_(2)
flushing = [reference_output(config, experts, *inputs) for inputs in work]
flushes = flushes and bool((torch.full((1,), 2.0**-126, dtype=torch.float32) * 0.5 == 0).item())
torch.set_flush_denormal(False)
for name, a, b in zip(("float32", "bfloat16", "float16"), flushing, plain):
    assert_same_bits(a, b, name)
print("the caller still flushes" if flushes else "this machine cannot flush, or the mode was lost")
"""


@pytest.mark.parametrize(
    ("hidden", "inner", "tokens", "workers", "default"),
    [
        (65, 33, 5, 1, "float32"),
        (64, 48, 900, 2, "float32"),
        (512, 256, 200, 3, "float32"),
        (40_000, 2, 3, 2, "float32"),
        (2, 40_000, 3, 2, "float32"),
        (65, 33, 5, 1, "float64"),
        (65, 33, 5, 1, "bfloat16"),
    ],
)
def test_flushing_denormals_changes_no_bit(hidden, inner, tokens, workers, default):
    arguments = [str(v) for v in (hidden, inner, tokens, workers, default)]
    run = subprocess.run(
        [sys.executable, "-c", FLUSHING, *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr[-1500:]
    assert "still flushes" in run.stdout
