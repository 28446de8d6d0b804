"""The tiers against the reference: what is particular to native code (strides, chunks, threads, fork, control word)."""

from __future__ import annotations

import contextlib
import os
import threading

import pytest
import torch
from packed_layer import make_layer

from int8moe import reference
from int8moe.contracts import ACTIVATIONS, MoEConfig
from int8moe.host import override_thread_limit
from int8moe.testing import assert_same_bits

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def expected_of(layer, x, weights, ids) -> torch.Tensor:
    config = layer.config
    return reference.fused_experts(
        x,
        topk_weights=weights,
        topk_ids=ids,
        activation=config.activation,
        expert_map=layer.expert_map,
        apply_router_weight_on_input=config.apply_router_weight_on_input,
        swiglu_alpha=config.swiglu_alpha,
        swiglu_limit=config.swiglu_limit,
        **layer.values,
    )


def run(kernel, layer, x, weights, ids) -> torch.Tensor:
    before = x.clone(), weights.clone(), ids.clone()
    out = torch.full((len(x), layer.config.hidden_size), 7.0, dtype=x.dtype)
    kernel.apply(layer.weights, x, weights, ids, out)
    for tensor, copy in zip((x, weights, ids), before, strict=True):
        assert torch.equal(tensor.nan_to_num(), copy.nan_to_num()), "inputs are never written"
    return out


def inputs(config: MoEConfig, tokens: int, dtype=torch.float32, seed: int = 1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, config.hidden_size, generator=generator).to(dtype)
    weights = torch.rand(tokens, config.top_k, generator=generator)
    ids = torch.randint(-1, config.num_experts + 1, (tokens, config.top_k), generator=generator)
    return x, weights, ids


def check(kernel, layer, x, weights, ids) -> None:
    assert_same_bits(run(kernel, layer, x, weights, ids), expected_of(layer, x, weights, ids))


@pytest.fixture
def little_scratch(native):
    """Chunks of a few tokens."""
    native.int8moe_set_scratch_limit(1)
    yield
    native.int8moe_set_scratch_limit(0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_and_dtypes(kernel, activation: str, dtype) -> None:
    config = MoEConfig(
        num_experts=3, top_k=2, hidden_size=70, intermediate_size=37, activation=activation, has_bias=True
    )
    check(kernel, make_layer(kernel, config), *inputs(config, 11, dtype))


@pytest.mark.parametrize("hidden", [1, 16, 63, 64, 65, 100, 2049])
@pytest.mark.parametrize("inner", [1, 15, 16, 17, 33, 176])
def test_shapes_off_the_grid(kernel, hidden: int, inner: int) -> None:
    config = MoEConfig(num_experts=2, top_k=1, hidden_size=hidden, intermediate_size=inner)
    check(kernel, make_layer(kernel, config), *inputs(config, 5))


@pytest.mark.parametrize("tokens", [*range(20), 31, 32, 33, 35, 36, 48, 65])
def test_every_remainder_of_the_row_tiles(kernel, tokens: int) -> None:
    config = MoEConfig(num_experts=1, top_k=1, hidden_size=64, intermediate_size=32)
    layer = make_layer(kernel, config)
    x, weights, _ = inputs(config, tokens)
    check(kernel, layer, x, weights, torch.zeros(tokens, 1, dtype=torch.int32))


@pytest.mark.parametrize("limit", [1, 30_000, 200_000])
def test_chunks(kernel, native, limit: int) -> None:
    config = MoEConfig(num_experts=4, top_k=3, hidden_size=128, intermediate_size=64)
    layer = make_layer(kernel, config)
    x, weights, ids = inputs(config, 67)
    try:
        native.int8moe_set_scratch_limit(limit)
        check(kernel, layer, x, weights, ids)
    finally:
        native.int8moe_set_scratch_limit(0)


def test_expert_map_and_duplicate_ids(kernel, little_scratch) -> None:
    expert_map = torch.tensor([2, -1, 0, 1, -1], dtype=torch.int32)
    config = MoEConfig(num_experts=5, num_local_experts=3, has_expert_map=True, top_k=3, hidden_size=40,
                       intermediate_size=24)  # fmt: skip
    layer = make_layer(kernel, config, expert_map=expert_map)
    x, weights, ids = inputs(config, 30)
    ids[3] = torch.tensor([2, 2, 0])
    ids[4] = -1
    check(kernel, layer, x, weights, ids)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_router_weight_on_the_input(kernel, dtype) -> None:
    config = MoEConfig(num_experts=3, top_k=1, hidden_size=70, intermediate_size=16, apply_router_weight_on_input=True)
    layer = make_layer(kernel, config)
    x, weights, ids = inputs(config, 9, dtype)
    check(kernel, layer, x, weights, ids)
    check(kernel, layer, x.t().contiguous().t(), weights.to(torch.bfloat16), ids)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides(kernel, dtype) -> None:
    config = MoEConfig(num_experts=4, top_k=2, hidden_size=50, intermediate_size=20)
    layer = make_layer(kernel, config)
    x, weights, ids = inputs(config, 12, dtype)
    wide = torch.randn(24, 200).to(dtype)
    variants = (
        x.t().contiguous().t(),
        wide[::2, 7:57],
        wide[:12, ::4],
        x[:1].expand(12, 50),
        x[:, :1].expand(12, 50),
    )
    for variant in variants:
        check(kernel, layer, variant, weights.t().contiguous().t(), ids.t().contiguous().t())
        check(kernel, layer, variant, weights[:1].expand(12, 2), ids[:1].expand(12, 2))
    check(kernel, layer, x.flip(0), weights.to(torch.float64), ids.to(torch.int32))


def test_special_rows(kernel) -> None:
    config = MoEConfig(num_experts=2, top_k=2, hidden_size=64, intermediate_size=48)
    layer = make_layer(kernel, config)
    x, weights, ids = inputs(config, 9)
    x[0], x[1], x[2], x[3] = 0.0, -0.0, 1e-39, 2.0**-126
    x[4, 5], x[5, 6] = float("nan"), float("-inf")
    x[6] = torch.arange(64) - 31.5
    x[6, 0] = 127.0
    check(kernel, layer, x, weights, ids)


def test_full_weight_range(kernel) -> None:
    """A 16-bit saturating pair-add fails it."""
    config = MoEConfig(num_experts=1, top_k=1, hidden_size=64, intermediate_size=64)
    layer = make_layer(kernel, config)
    kernel.restore_weights(layer.weights)
    for target in (layer.values, vars(layer.weights)["_buffers"]):
        target["w13_weight"][:, :64], target["w13_weight"][:, 64:], target["w2_weight"][:] = 1, -128, -128
        target["w13_weight_scale"][:, :64], target["w13_weight_scale"][:, 64:] = 1.0, 1 / 128
        target["w2_weight_scale"][:] = 1 / 128
    kernel.process_weights_after_loading(layer.weights)
    for tokens in (1, 2, 16, 17):
        x, weights = torch.ones(tokens, 64), torch.ones(tokens, 1)
        ids = torch.zeros(tokens, 1, dtype=torch.int64)
        out = run(kernel, layer, x, weights, ids)
        assert_same_bits(out, expected_of(layer, x, weights, ids))
        assert (out == out[0, 0]).all()


def test_flush_to_zero_in_the_caller_changes_no_bit(kernel) -> None:
    config = MoEConfig(num_experts=2, top_k=2, hidden_size=64, intermediate_size=32)
    layer = make_layer(kernel, config)
    x, weights, ids = inputs(config, 40)
    x, weights = x * 1e-38, weights * 1e-38
    expected = expected_of(layer, x, weights, ids)
    assert torch.set_flush_denormal(True)
    try:
        out = run(kernel, layer, x, weights, ids)
        assert (torch.full((1,), 2.0**-126) * 0.5 == 0).item(), "the caller's control word is put back"
    finally:
        torch.set_flush_denormal(False)
    assert_same_bits(out, expected)


@contextlib.contextmanager
def workers(count: int):
    """Calls inside run on ``count`` workers, whatever the machine has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        with override_thread_limit(count):
            yield
    finally:
        torch.set_num_threads(threads)


def test_thread_counts(kernel) -> None:
    config = MoEConfig(num_experts=8, top_k=2, hidden_size=512, intermediate_size=256)
    layer = make_layer(kernel, config)
    x, weights, ids = inputs(config, 200, torch.bfloat16)
    expected = expected_of(layer, x, weights, ids)
    for count in (1, 2, 3, 7, 64):
        with workers(count):
            assert_same_bits(run(kernel, layer, x, weights, ids), expected)


@pytest.mark.parametrize("activation", ["silu", "relu2_no_mul"])
def test_one_expert_with_most_of_the_rows(kernel, activation: str) -> None:
    """An expert's rows are cut into pieces, and few columns into narrow tasks: no cut changes a bit."""
    config = MoEConfig(num_experts=5, top_k=2, hidden_size=112, intermediate_size=48, activation=activation)
    layer = make_layer(kernel, config)
    x, weights, ids = inputs(config, 1100)
    ids[:, 0], ids[:7, 1], ids[7:, 1] = 3, 4, -1
    expected = expected_of(layer, x, weights, ids)
    for count in (1, 2, 5, 32):
        with workers(count):
            assert_same_bits(run(kernel, layer, x, weights, ids), expected)


def test_position_in_the_batch(kernel) -> None:
    config = MoEConfig(num_experts=4, top_k=2, hidden_size=96, intermediate_size=64)
    layer = make_layer(kernel, config)
    x, weights, ids = inputs(config, 33, torch.float16)
    together = run(kernel, layer, x, weights, ids)
    alone = torch.cat([run(kernel, layer, x[i : i + 1], weights[i : i + 1], ids[i : i + 1]) for i in range(33)])
    assert_same_bits(together, alone)


@pytest.mark.parametrize("counts", [[4, 0, 7, 1], [0, 0, 0, 0], [12, 0, 0, 0]])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("limit", [0, 1])
def test_rows(kernel, native, counts: list[int], kind: str, limit: int) -> None:
    config = MoEConfig(num_experts=4, top_k=1, hidden_size=70, intermediate_size=33, has_bias=limit == 0)
    layer = make_layer(kernel, config)
    generator = torch.Generator().manual_seed(3)
    rows, scales = torch.randn(sum(counts), 70, generator=generator), None
    if kind == "int8":
        rows, scales = reference.quantize_rows(rows)
    else:
        rows = rows.to(getattr(torch, kind))
    out, expected = torch.zeros(len(rows), 70), torch.zeros(len(rows), 70)
    counted = torch.tensor(counts, dtype=torch.int32 if limit else torch.int64)
    try:
        native.int8moe_set_scratch_limit(limit)
        kernel.apply_rows(layer.weights, rows.t().contiguous().t(), scales, counted, out)
    finally:
        native.int8moe_set_scratch_limit(0)
    kernel.restore_weights(layer.weights)
    reference.ReferenceExperts().apply_rows(layer.weights, rows, scales, counted, expected)
    assert_same_bits(out, expected)


def test_concurrent_callers(kernel) -> None:
    config = MoEConfig(num_experts=4, top_k=2, hidden_size=128, intermediate_size=64)
    layer = make_layer(kernel, config)
    sets = [inputs(config, 5 + 9 * i, seed=i) for i in range(4)]
    expected = [expected_of(layer, *s) for s in sets]
    found: list[list[torch.Tensor]] = [[] for _ in sets]

    def work(i: int) -> None:
        for _ in range(20):
            found[i].append(run(kernel, layer, *sets[i]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(sets))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for outs, right in zip(found, expected, strict=True):
        assert len(outs) == 20
        for out in outs:
            assert_same_bits(out, right)


def test_scratch_is_kept_bounded_and_released(kernel, native) -> None:
    config = MoEConfig(num_experts=4, top_k=2, hidden_size=128, intermediate_size=64)
    layer = make_layer(kernel, config)
    batch = inputs(config, 64)
    native.int8moe_release_scratch()
    assert native.int8moe_scratch_bytes() == 0
    run(kernel, layer, *batch)
    kept = native.int8moe_scratch_bytes()
    assert kept > 0
    for _ in range(3):
        run(kernel, layer, *batch)
    assert native.int8moe_scratch_bytes() == kept
    native.int8moe_release_scratch()
    assert native.int8moe_scratch_bytes() == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_child_of_a_fork_runs_serially(kernel) -> None:
    """torch's own pool would hang there."""
    config = MoEConfig(num_experts=8, top_k=2, hidden_size=512, intermediate_size=256)
    layer = make_layer(kernel, config)
    x, weights, ids = inputs(config, 64)
    parent = run(kernel, layer, x, weights, ids)
    out = torch.zeros_like(parent).share_memory_()
    child = os.fork()
    if child == 0:
        try:
            kernel.apply(layer.weights, x, weights, ids, out)
            os._exit(0)
        except BaseException:
            os._exit(1)
    deadline = threading.Timer(20, os.kill, (child, 9))
    deadline.start()
    try:
        _, status = os.waitpid(child, 0)
    finally:
        deadline.cancel()
    assert status == 0
    assert_same_bits(out, parent)
