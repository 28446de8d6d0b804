"""FusedMoE from load to forward: states, copies, files, refusals."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from int8moe import (
    ConfigError,
    FusedMoE,
    MoEConfig,
    UnsupportedInputError,
    WeightLayoutError,
    list_kernels,
    quantize_experts,
    reference,
)
from int8moe.testing import assert_same_bits
from int8moe.weights import ExpertWeights

KERNELS = [kernel.name for kernel in list_kernels() if kernel.available and kernel.device == "cpu"]
CONFIG = MoEConfig(num_experts=6, top_k=2, hidden_size=100, intermediate_size=33)


def experts(config: MoEConfig = CONFIG, seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    count = config.local_experts
    w13 = torch.randn(count, config.w13_rows, config.hidden_size, generator=g)
    w2 = torch.randn(count, config.hidden_size, config.intermediate_size, generator=g)
    names = ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale")
    tensors = dict(zip(names, quantize_experts(w13, w2), strict=True))
    if config.has_bias:
        tensors["w13_bias"] = torch.randn(count, config.w13_rows, generator=g)
        tensors["w2_bias"] = torch.randn(count, config.hidden_size, generator=g)
    return tensors


def inputs(tokens: int = 7, config: MoEConfig = CONFIG, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, config.hidden_size, generator=g).to(dtype)
    weights = torch.rand(tokens, config.top_k, generator=g)
    return x, weights, torch.randint(0, config.num_experts, (tokens, config.top_k), generator=g)


def packed(kernel: str | None = None, seed: int = 0, config: MoEConfig = CONFIG, **options: Any) -> FusedMoE:
    layer = FusedMoE(config, kernel=kernel, **options)
    layer.load_weights(**experts(layer.config, seed))
    layer.process_weights_after_loading()
    return layer


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_the_order_of_life(kernel: str) -> None:
    layer = FusedMoE(CONFIG, kernel=kernel)
    x, weights, ids = inputs()
    with pytest.raises(WeightLayoutError, match=f"{kernel}.*load_weights"):
        layer(x, weights, ids)
    with pytest.raises(WeightLayoutError, match=kernel):
        layer.process_weights_after_loading()
    tensors = experts()
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    layer.load_weights(**tensors)
    with pytest.raises(WeightLayoutError, match=f"FusedMoE.*{kernel}.*process_weights_after_loading"):
        layer(x, weights, ids)
    assert layer.weight_layout is None
    layer.process_weights_after_loading()
    first = layer(x, weights, ids)
    layer.process_weights_after_loading()  # a no-op
    assert_same_bits(layer(x, weights, ids), first)
    assert_same_bits(first, reference.fused_experts(x, topk_weights=weights, topk_ids=ids, **tensors))
    for name, tensor in tensors.items():
        assert torch.equal(tensor, before[name])  # neither written nor kept
        tensor.zero_()
    assert_same_bits(layer(x, weights, ids), first)
    assert layer.kernel.name == kernel == layer.selection.chosen
    with pytest.raises(WeightLayoutError, match="reload_weights"):
        layer.load_weights(**experts())
    layer.reset()
    with pytest.raises(WeightLayoutError, match="empty"):
        layer(x, weights, ids)


def test_reload_equals_a_fresh_load(kernel: str) -> None:
    layer, fresh = packed(kernel, seed=1), packed(kernel, seed=2)
    layer.reload_weights(**experts(seed=2))
    assert_same_bits(layer(*inputs()), fresh(*inputs()))
    bad = experts(seed=3)
    bad["w2_weight_scale"][4, 7] = float("nan")
    with pytest.raises(WeightLayoutError, match=r"w2_weight_scale of experts 4"):
        layer.reload_weights(**bad)
    assert_same_bits(layer(*inputs()), fresh(*inputs()))  # the old weights still stand


def test_restore_gives_the_canonical_tensors_back(kernel: str) -> None:
    layer = packed(kernel)
    layer.restore_weights()
    for name, tensor in experts().items():
        assert torch.equal(getattr(layer, name), tensor)
    layer.process_weights_after_loading()
    assert_same_bits(layer(*inputs()), packed("reference.torch")(*inputs()))


def test_expert_by_expert_equals_all_at_once(kernel: str) -> None:
    tensors, inner = experts(), CONFIG.intermediate_size
    layer = FusedMoE(CONFIG, kernel=kernel)
    for expert in (3, 0, 5, 1, 4):
        layer.load_expert_weights(expert, **{name: tensor[expert] for name, tensor in tensors.items()})
    with pytest.raises(WeightLayoutError, match="experts 2 are not loaded"):
        layer.process_weights_after_loading()
    pair = {name: (tensor[2, :inner], tensor[2, inner:]) for name, tensor in tensors.items() if name.startswith("w13")}
    layer.load_expert_weights(2, **pair, **{n: t[2] for n, t in tensors.items() if n.startswith("w2")})
    layer.process_weights_after_loading()
    assert_same_bits(layer(*inputs()), packed(kernel)(*inputs()))
    with pytest.raises(WeightLayoutError, match="expert 6 does not exist"):
        layer.load_expert_weights(6, **{name: tensor[0] for name, tensor in tensors.items()})


def test_interleaved_rows_load_to_the_same_layer(kernel: str) -> None:
    config = CONFIG.model_copy(update={"has_bias": True})
    tensors, inner = experts(config), CONFIG.intermediate_size
    mixed = dict(tensors)
    for name in ("w13_weight", "w13_weight_scale", "w13_bias"):
        gate, up = tensors[name][:, :inner], tensors[name][:, inner:]
        mixed[name] = torch.stack([gate, up], dim=2).reshape(tensors[name].shape)
    layers = []
    for values, layout in ((tensors, "stacked"), (mixed, "interleaved"), (mixed, "stacked")):
        layer = FusedMoE(config, kernel=kernel)
        layer.load_weights(**values, gate_up_layout=layout)
        layer.process_weights_after_loading()
        layers.append(layer(*inputs()))
    assert_same_bits(layers[0], layers[1])
    assert not torch.equal(layers[0], layers[2])  # a wrong guess would show
    with pytest.raises(WeightLayoutError, match="gate_up_layout"):
        FusedMoE(config, kernel=kernel).load_weights(**tensors, gate_up_layout="guess")


def scale_forms(count: int, rows: int, gated: bool) -> dict[str, torch.Tensor]:
    forms = {
        "a row": torch.rand(count, rows), "trailing 1": torch.rand(count, rows, 1), "an expert": torch.rand(count),
        "an expert, trailing 1": torch.rand(count, 1), "one": torch.tensor(0.01),
        "bf16": torch.rand(count, rows).bfloat16(), "fp16": torch.rand(count, rows).half(),
    }  # fmt: skip
    return {**forms, "gate and up": torch.rand(count, 2)} if gated else forms


@pytest.mark.parametrize("form", scale_forms(1, 1, True))
def test_scales_are_broadcast_to_channels_in_fp32(form: str) -> None:
    tensors, inner = experts(), CONFIG.intermediate_size
    scale = scale_forms(CONFIG.num_experts, CONFIG.w13_rows, True)[form]
    wanted = scale.float()
    if form == "gate and up":
        wanted = wanted.repeat_interleave(inner, dim=1)
    wanted = wanted.reshape(CONFIG.num_experts if scale.dim() else 1, -1).expand(CONFIG.num_experts, CONFIG.w13_rows)
    layer = FusedMoE(CONFIG, kernel="reference.torch")
    layer.load_weights(**{**tensors, "w13_weight_scale": scale})
    assert layer.w13_weight_scale.dtype == torch.float32
    assert torch.equal(layer.w13_weight_scale, wanted)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.5])
@pytest.mark.parametrize("name", ["w13_weight_scale", "w2_weight_scale"])
def test_a_bad_scale_names_parameter_and_experts(name: str, value: float) -> None:
    tensors = experts()
    tensors[name][5, 3] = value
    tensors[name][1, 0] = value
    layer = FusedMoE(CONFIG)
    with pytest.raises(WeightLayoutError, match=f"{name} of experts 1, 5"):
        layer.load_weights(**tensors)
    one = {n: t[5] for n, t in tensors.items()}
    with pytest.raises(WeightLayoutError, match=f"expert 5: {name} of experts 5"):
        layer.load_expert_weights(5, **one)


def test_a_zero_scale_is_legal(kernel: str) -> None:
    tensors = experts()
    tensors["w2_weight_scale"].zero_()
    layer = FusedMoE(CONFIG, kernel=kernel)
    layer.load_weights(**tensors)
    layer.process_weights_after_loading()
    assert_same_bits(layer(*inputs()), torch.zeros(7, CONFIG.hidden_size))


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [("w13_weight", torch.zeros(6, 66, 100), "int8 is wanted"), ("w13_weight", torch.zeros(6, 66, 99, dtype=torch.int8), "shape"),
     ("w2_weight", torch.zeros(5, 100, 33, dtype=torch.int8), "shape"), ("w2_weight_scale", torch.zeros(6, 50), "group"),
     ("w2_weight_scale", torch.zeros(6, 100, dtype=torch.int32), "int32"), ("w13_weight_scale", None, "missing"),
     ("w2_bias", torch.zeros(6, 100), "has_bias=False")],
)  # fmt: skip
def test_wrong_tensors_are_refused_before_anything_is_written(name: str, value: Any, word: str) -> None:
    layer = FusedMoE(CONFIG)
    with pytest.raises(WeightLayoutError, match=f"{name}.*{word}"):
        layer.load_weights(**{**experts(), name: value})
    assert layer.state == "empty"


def test_router_weight_on_the_input(kernel: str) -> None:
    on = MoEConfig(num_experts=4, top_k=1, hidden_size=32, intermediate_size=16, apply_router_weight_on_input=True)
    off = on.model_copy(update={"apply_router_weight_on_input": False})
    x, _, ids = inputs(5, on)
    weights, before = torch.full((5, 1), 0.5), x.clone()
    outs = [packed(kernel, config=config)(x, weights, ids) for config in (on, off)]
    assert not torch.equal(*outs)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_dtypes_of_the_outside_world(kernel: str, dtype: torch.dtype, ids_dtype: torch.dtype) -> None:
    x, weights, ids = inputs(dtype=dtype)
    layer = packed(kernel)
    out = layer(x, weights.bfloat16(), ids.to(ids_dtype))
    assert out.dtype == dtype
    assert_same_bits(out, layer(x, weights.bfloat16().float(), ids))


@pytest.mark.parametrize(
    ("change", "word"),
    [({"hidden_states": torch.zeros(7, 100, dtype=torch.float64)}, "hidden_states.*float64"),
     ({"hidden_states": torch.zeros(7, 99)}, "hidden_states.*99"), ({"topk_ids": torch.zeros(7, 3, dtype=torch.int32)}, "topk_ids"),
     ({"topk_ids": torch.zeros(7, 2, dtype=torch.int16)}, "topk_ids.*int16"), ({"topk_ids": torch.zeros(7, 2)}, "topk_ids"),
     ({"topk_weights": torch.zeros(6, 2)}, "topk_weights"), ({"topk_weights": torch.zeros(7, 2, dtype=torch.int32)}, "topk_weights"),
     ({"hidden_states": torch.zeros(7, 100, device="meta")}, "topk_weights|hidden_states")],
)  # fmt: skip
def test_inputs_that_do_not_fit_are_refused_by_name(change: dict[str, torch.Tensor], word: str) -> None:
    x, weights, ids = inputs()
    with pytest.raises(UnsupportedInputError, match=word):
        packed()(**{"hidden_states": x, "topk_weights": weights, "topk_ids": ids, **change})


def test_a_pinned_hidden_dtype_is_kept() -> None:
    layer = packed(config=CONFIG.model_copy(update={"hidden_dtype": "bfloat16"}))
    with pytest.raises(UnsupportedInputError, match="bfloat16"):
        layer(*inputs())
    assert layer(*inputs(dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_leading_dimensions_come_back(kernel: str) -> None:
    layer = packed(kernel)
    x, weights, ids = inputs(12)
    out = layer(x.view(3, 4, 100), weights.view(3, 4, 2), ids.view(3, 4, 2))
    assert out.shape == (3, 4, 100)
    assert_same_bits(out.view(12, 100), layer(x, weights, ids))
    assert_same_bits(layer(x.view(3, 4, 100), weights, ids), out)
    assert_same_bits(layer(x[0], weights[0], ids[0]), out[0, 0])


def test_out_is_written_also_when_it_overlaps_an_input(kernel: str) -> None:
    layer = packed(kernel)
    x, weights, ids = inputs(300)
    expected = layer(x, weights, ids)
    out = torch.empty_like(x)
    assert layer(x, weights, ids, out=out) is out
    assert_same_bits(out, expected)
    wide = torch.zeros(300, 200)
    layer(x, weights, ids, out=wide[:, ::2])
    assert_same_bits(wide[:, ::2].contiguous(), expected)
    assert not wide[:, 1::2].any()
    layer(x, weights, ids, out=x)
    assert_same_bits(x, expected)
    with pytest.raises(UnsupportedInputError, match="out"):
        layer(*inputs(3), out=out)


def test_expert_parallel_subset(kernel: str) -> None:
    whole = packed(kernel)
    tensors, x, weights, ids = experts(), *inputs(9)
    total = torch.zeros(9, 100)
    for held in ([0, 2, 5], [1, 3, 4]):
        table = [held.index(e) if e in held else -1 for e in range(6)]
        layer = FusedMoE(CONFIG, kernel=kernel, expert_map=table)
        for expert in range(6):
            stored = layer.load_expert_weights(expert, **{n: t[expert] for n, t in tensors.items()})
            assert stored == (expert in held)
        layer.process_weights_after_loading()
        total += layer(x, weights, ids)
    assert torch.allclose(total, whole(x, weights, ids), rtol=1e-5, atol=1e-5)
    for bad in ([0, 0, 1, 2, 3, 4], [0, 2, -1, -1, -1, -1], [0, 1], [-2, 0, 1, 2, 3, 4]):
        with pytest.raises(ConfigError, match="expert_map"):
            FusedMoE(CONFIG, expert_map=bad)


@pytest.mark.parametrize("cast", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.double()])
def test_casts_leave_scales_in_fp32(kernel: str, cast: Any) -> None:
    layer = packed(kernel, config=CONFIG.model_copy(update={"has_bias": True}))
    expected = layer(*inputs())
    cast(layer)
    assert layer.w13_weight_scale.dtype == layer.w2_weight_scale.dtype == layer.w2_bias.dtype == torch.float32
    assert_same_bits(layer(*inputs()), expected)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_of_a_packed_layer_are_independent(kernel: str, way: Any) -> None:
    layer = packed(kernel)
    twin = way(layer)
    layer.reload_weights(**experts(seed=9))
    assert_same_bits(twin(*inputs()), packed(kernel)(*inputs()))


def test_state_dict_carries_the_tag(kernel: str, tmp_path: Any) -> None:
    layer = packed(kernel)
    path = tmp_path / "state.pt"
    torch.save(torch.nn.Sequential(layer).state_dict(), path)
    twin = torch.nn.Sequential(FusedMoE(CONFIG, kernel=kernel))
    twin.load_state_dict(torch.load(path, weights_only=True))
    assert_same_bits(twin[0](*inputs()), layer(*inputs()))
    state = layer.state_dict()
    assert state["_extra_state"]["layout"]["name"] == layer.weight_layout.name
    state["_extra_state"]["layout"]["version"] += 1
    with pytest.raises(WeightLayoutError, match="packed as"):
        FusedMoE(CONFIG, kernel=kernel).load_state_dict(state)
    other = CONFIG.model_copy(update={"hidden_size": 64})
    with pytest.raises((WeightLayoutError, RuntimeError)):
        FusedMoE(other, kernel=kernel).load_state_dict(layer.state_dict())


def test_a_canonical_state_loads_into_any_kernel(kernel: str) -> None:
    layer = FusedMoE(CONFIG, kernel="reference.torch")
    layer.load_weights(**experts())
    twin = FusedMoE(CONFIG, kernel=kernel)
    twin.load_state_dict(layer.state_dict())
    twin.process_weights_after_loading()
    assert_same_bits(twin(*inputs()), packed(kernel)(*inputs()))


def test_an_empty_state_is_an_error_when_strict(kernel: str) -> None:
    with pytest.raises(RuntimeError, match="Missing key"):
        FusedMoE(CONFIG, kernel=kernel).load_state_dict({})


def test_a_packed_layer_does_not_change_device(kernel: str) -> None:
    with pytest.raises(WeightLayoutError, match="restore_weights"):
        packed(kernel).to("meta")


def test_a_foreign_tag_is_refused_at_the_call(kernel: str) -> None:
    layer = packed(kernel)
    layer.layout = layer.weight_layout.model_copy(update={"version": 99})
    with pytest.raises(WeightLayoutError, match="99"):
        layer(*inputs())


def test_sorted_rows_are_the_unweighted_rows(kernel: str) -> None:
    layer, tensors = packed(kernel), experts()
    if layer.kernel.apply_rows is None:
        pytest.skip(f"{kernel} has no apply_rows")
    counts = [2, 0, 3, 1, 0, 4]
    rows = torch.randn(sum(counts), 100)
    out = layer.forward_sorted(rows, counts)
    ids = torch.repeat_interleave(torch.arange(6), torch.tensor(counts)).unsqueeze(1)
    expected = reference.fused_experts(rows, topk_weights=torch.ones(len(rows), 1), topk_ids=ids, **tensors)
    assert torch.equal(out, expected)  # equal up to the sign of a zero, which the sum that starts at +0 loses
    q, scales = reference.quantize_rows(rows)
    assert_same_bits(layer.forward_sorted(q, torch.tensor(counts), row_scales=scales), out)
    with pytest.raises(UnsupportedInputError, match="num_tokens_per_expert"):
        layer.forward_sorted(rows, [1, 2, 3, 0, 0, 0])


def test_a_failing_pack_leaves_an_empty_layer(kernel: str) -> None:
    layer = FusedMoE(CONFIG, kernel=kernel)
    layer.load_weights(**experts())

    class Kernel:
        name = kernel
        restore_weights = None

        @staticmethod
        def process_weights_after_loading(weights: Any) -> None:
            weights.w13_weight = None
            raise MemoryError("no room")

    with pytest.raises(WeightLayoutError, match="no room.*load again"):
        layer.pack(Kernel())
    assert layer.state == "empty"
    layer.load_weights(**experts())
    layer.process_weights_after_loading()
    assert_same_bits(layer(*inputs()), packed(kernel)(*inputs()))


def test_a_device_without_a_number_is_settled_when_the_layer_is_made() -> None:
    """ "cuda" is not equal to the "cuda:0" of its tensors, and means another one when the current device changes."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():  # knows devices that are not here
        weights = ExpertWeights(MoEConfig(num_experts=2, top_k=1, hidden_size=4, intermediate_size=4), device="cuda")
        weights.allocate()
        assert weights._home == weights.w13_weight.device == torch.device("cuda", 0)
