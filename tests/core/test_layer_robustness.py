"""A layer under threads, forks, ambient torch modes and odd tensors."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_layer import CONFIG, KERNELS, experts, inputs, packed

from int8moe import FusedMoE, Int8MoEError, MoEConfig, UnsupportedInputError, WeightLayoutError, quantize_experts
from int8moe.testing import assert_same_bits


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_reload_in_another_thread_leaves_calls_whole(kernel: str) -> None:
    layer = packed(kernel, seed=0)
    call = inputs()
    answers = [packed(kernel, seed=seed)(*call) for seed in (0, 1)]
    stop, wrong = threading.Event(), []

    def caller() -> None:
        while not stop.is_set():
            try:
                out = layer(*call)
            except WeightLayoutError:  # between two loads
                continue
            if not any(torch.equal(out, answer) for answer in answers):
                wrong.append(out)

    threads = [threading.Thread(target=caller) for _ in range(2)]
    for thread in threads:
        thread.start()
    for turn in range(12):
        layer.reload_weights(**experts(seed=turn % 2))
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong


MODES = """
import contextlib, torch, int8moe
from torch._subclasses.fake_tensor import FakeTensorMode
config = int8moe.MoEConfig(num_experts=4, top_k=2, hidden_size=32, intermediate_size=16)
default = lambda: contextlib.nullcontext()
mode = {mode}
with mode:
    layer = int8moe.FusedMoE(config, kernel={kernel!r})
q = int8moe.quantize_experts(torch.randn(4, 32, 32), torch.randn(4, 32, 16))
names = ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale")
layer = int8moe.FusedMoE(config, kernel={kernel!r})
layer.load_weights(**dict(zip(names, q)))
layer.process_weights_after_loading()
call = torch.randn(3, 32), torch.rand(3, 2), torch.randint(0, 4, (3, 2))
before = layer(*call)
if {again}:
    with mode:
        assert torch.equal(layer(*call), before)
"""


@pytest.mark.parametrize(
    ("mode", "again"), [('torch.device("meta")', True), ("FakeTensorMode()", False), ("torch.inference_mode()", False)]
)
def test_an_ambient_mode_does_not_condemn_a_kernel(
    isolated: Callable[..., Any], kernel: str, mode: str, again: bool
) -> None:
    done = isolated(MODES.format(mode=mode, again=again, kernel=kernel))
    assert done.returncode == 0, done.stderr


def test_lazily_negated_tensors(kernel: str) -> None:
    layer = packed(kernel)
    x, weights, ids = inputs()
    negated = torch.complex(torch.zeros_like(x), x).conj().imag
    assert negated.is_neg()
    assert_same_bits(layer(negated, weights, ids), layer(negated.contiguous(), weights, ids))
    lazy = torch.complex(torch.zeros_like(weights), weights).conj().imag
    assert_same_bits(layer(x, lazy, ids), layer(x, lazy.contiguous(), ids))


def test_a_state_that_shares_changed_storage_is_refused(kernel: str) -> None:
    layer = FusedMoE(CONFIG, kernel=kernel)
    layer.load_weights(**experts())
    canonical = layer.state_dict()
    layer.process_weights_after_loading()
    fresh = FusedMoE(CONFIG, kernel=kernel)
    if layer.weight_layout.is_canonical:  # nothing was moved
        fresh.load_state_dict(canonical)
        fresh.process_weights_after_loading()
        assert_same_bits(fresh(*inputs()), layer(*inputs()))
        return
    with pytest.raises(WeightLayoutError, match="packed after state_dict"):
        fresh.load_state_dict(canonical)
    state = layer.state_dict()
    fresh.load_state_dict(state)
    assert_same_bits(fresh(*inputs()), layer(*inputs()))
    layer.restore_weights()
    with pytest.raises(WeightLayoutError, match="restored after state_dict"):
        FusedMoE(CONFIG, kernel=kernel).load_state_dict(state)


def test_a_pickle_of_another_layout_is_refused(kernel: str) -> None:
    layer = packed(kernel)
    name = layer.weight_layout.name.encode()
    with pytest.raises(WeightLayoutError, match="packed as"):
        pickle.loads(pickle.dumps(layer).replace(name, name[:-1] + b"X"))


def test_a_rank_without_experts(kernel: str) -> None:
    layer = FusedMoE(CONFIG, kernel=kernel, expert_map=[-1] * CONFIG.num_experts)
    for expert in range(CONFIG.num_experts):
        assert not layer.load_expert_weights(expert, **{n: t[expert] for n, t in experts().items()})
    layer.process_weights_after_loading()
    assert_same_bits(layer(*inputs()), torch.zeros(7, CONFIG.hidden_size))


def test_loading_in_inference_mode_and_again_outside(kernel: str) -> None:
    layer = FusedMoE(CONFIG, kernel=kernel)
    with torch.inference_mode():
        layer.load_weights(**experts(seed=3))
    layer.load_weights(**experts())
    with torch.inference_mode():
        layer.process_weights_after_loading()
    assert_same_bits(layer(*inputs()), packed(kernel)(*inputs()))
    layer.restore_weights()


@pytest.mark.parametrize("value", [torch.zeros(6, 100, 33, dtype=torch.int8, device="meta"), [1, 2], "x"])
def test_a_load_that_fails_leaves_no_mixture(kernel: str, value: Any) -> None:
    layer = packed(kernel)
    before = layer(*inputs())
    with pytest.raises(WeightLayoutError, match="w2_weight"):
        layer.reload_weights(**{**experts(seed=5), "w2_weight": value})
    assert_same_bits(layer(*inputs()), before)


def test_gradients_are_refused_everywhere(kernel: str) -> None:
    layer = packed(kernel)
    x, weights, ids = inputs()
    with pytest.raises(Int8MoEError, match="inference"):
        layer(x.requires_grad_(), weights, ids).sum().backward()
    if layer.kernel.apply_rows is not None:
        with pytest.raises(Int8MoEError, match="inference"):
            layer.forward_sorted(x, [7, 0, 0, 0, 0, 0])


def test_the_operator_checks_what_it_hands_to_native_code(kernel: str) -> None:
    layer = packed(kernel)
    x, weights, ids = inputs()

    def call(**change: Any) -> torch.Tensor:
        given = {
            "x": x,
            "weights": weights,
            "ids": ids,
            "w13": layer.w13_weight,
            "scale": layer.w13_weight_scale,
            **change,
        }
        return torch.ops.int8moe.fused_experts(
            given["x"], given["weights"], given["ids"], given["w13"], given["scale"], None,
            layer.w2_weight, layer.w2_weight_scale, None, None, [], [], *layer._op_arguments,
        )  # fmt: skip

    assert_same_bits(call(), layer(x, weights, ids))
    for change in (
        {"x": x[:, :8]},
        {"x": x.double()},
        {"ids": ids[:1]},
        {"ids": ids.float()},
        {"weights": weights[:, :1]},
    ):
        with pytest.raises(UnsupportedInputError):
            call(**change)
    with pytest.raises(WeightLayoutError):
        call(scale=layer.w13_weight_scale[:, :1])
    if not layer.weight_layout.is_canonical:
        with pytest.raises(WeightLayoutError):
            call(w13=layer.w13_weight[:, :8])


def test_odd_arguments_are_refused_by_name(kernel: str) -> None:
    layer = packed(kernel)
    x, weights, ids = inputs()
    for bad in (None, [1.0], x.to_sparse()):
        with pytest.raises(UnsupportedInputError, match="hidden_states|topk_weights"):
            layer(
                bad if bad is not None and not isinstance(bad, list) else x,
                bad if bad is None or isinstance(bad, list) else weights,
                ids,
            )
    with pytest.raises(ValueError, match="expert_map"):
        FusedMoE(
            MoEConfig(num_experts=4, top_k=1, hidden_size=8, intermediate_size=8),
            expert_map=torch.tensor([2**32, 1, 2, 3]),
        )


def test_quantize_experts_under_a_default_device() -> None:
    w13, w2 = torch.randn(2, 8, 6), torch.randn(2, 6, 4)
    expected = quantize_experts(w13, w2)
    with torch.device("meta"):
        found = quantize_experts(w13, w2)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
