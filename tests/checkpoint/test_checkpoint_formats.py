"""The same int8 experts load to equal layers from every format, model type and layout; lookalikes are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_builder import (
    EXPERTS,
    KEY,
    PARAMETERS,
    assert_equal,
    config,
    expected,
    group,
    quantization,
    refusal,
    tensors,
    write,
)  # fmt: skip
from format_builder import (
    MODELS,
    W8A8_INT8,
    Stored,
    description,
    float_scales,
    fuse,
    model_config,
    quark,
    with_biases,
    with_zeros,
    write_modelslim,
)
from torch import Tensor

from int8moe.checkpoint import inspect_checkpoint, load_moe_layers
from int8moe.checkpoint.families import FAMILIES
from int8moe.errors import CheckpointError


def write_format(folder: Path, name: str, stored: Stored) -> Path:
    """The experts of ``stored`` in one of the formats."""
    if name == "w8a8_int8":
        return write(folder, config(quant=W8A8_INT8), float_scales(stored))
    if name == "quark":
        stored = with_zeros(float_scales(stored, flat=True), "zero_point", torch.int32)
        return write(folder, config(quant=quark()), stored)
    if name == "modelslim":
        stored = with_zeros(float_scales(stored), "offset", torch.float32)
        return write_modelslim(folder, config(), description(stored), stored)
    if name == "modelslim by quant_method":
        return write_modelslim(folder, config(quant={"quant_method": "ascend"}), description(stored), stored)
    assert name == "no quantization_config"
    return write(folder, config(), stored)


FORMATS = {
    "w8a8_int8": "w8a8_int8 W8A8 (channel)",
    "quark": "quark W8A8 (channel)",
    "modelslim": "ModelSlim W8A8 (channel)",
    "modelslim by quant_method": "ModelSlim W8A8 (channel)",
    "no quantization_config": "int8 by its names",
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_loads_to_the_same_layers(tmp_path: Path, name: str) -> None:
    stored = tensors()
    folder = write_format(tmp_path / "checkpoint", name, stored)
    plan = inspect_checkpoint(folder)
    assert plan.scheme == FORMATS[name]
    layers = load_moe_layers(plan, kernel="reference.torch")
    for index in range(2):
        assert_equal(layers[KEY.format(index)], expected(stored, "qwen3_moe", index))


@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize("layout", ["per expert", "fused"])
def test_every_model_type_in_both_layouts(tmp_path: Path, model_type: str, layout: str) -> None:
    assert set(MODELS) == set(FAMILIES)
    spelling = "mixtral" if model_type == "mixtral" else "qwen3_moe"
    stored = tensors(spelling)
    biased = model_type == "gpt_oss"
    on_disk = with_biases(stored) if biased else stored
    if layout == "fused":
        on_disk = fuse(on_disk, transposed=biased, interleaved=biased)
    folder = write(tmp_path, model_config(model_type, quantization()), on_disk)
    layers = load_moe_layers(folder, kernel="reference.torch")
    assert list(layers) == [KEY.format(0), KEY.format(1)]
    for index, layer in enumerate(layers.values()):
        assert_equal(layer, expected(stored, spelling, index))
        assert layer.config.activation == ("swigluoai" if biased else "silu")
        assert (layer.w13_bias is not None) == biased
    if biased:
        biases, last = with_biases(stored), layers[KEY.format(1)]
        assert last.config.swiglu_limit == 5.0
        for e in range(EXPERTS):
            gate, up, down = (biases[f"{KEY.format(1)}.{e}.{p}_proj.bias"].float() for p in ("gate", "up", "down"))
            assert torch.equal(last.w13_bias[e], torch.cat([gate, up]))
            assert torch.equal(last.w2_bias[e], down)


@pytest.mark.parametrize("layout", ["stacked", "transposed and interleaved"])
def test_fused_floats_quantise_to_the_layers_of_single_ones(tmp_path: Path, layout: str) -> None:
    """Both layouts of fused floats hold the experts of a per-expert checkpoint, and quantise to the same bits."""
    stored = tensors(quantized=False)
    if layout == "stacked":
        model, on_disk = "qwen3_moe", fuse(stored)
    else:
        stored = with_biases(stored)
        model, on_disk = "gpt_oss", fuse(stored, transposed=True, interleaved=True)
    one = load_moe_layers(write(tmp_path / "a", model_config(model), stored), quantize=True, kernel="reference.torch")
    two = load_moe_layers(write(tmp_path / "b", model_config(model), on_disk), quantize=True, kernel="reference.torch")
    assert list(one) == list(two) == [KEY.format(0), KEY.format(1)]
    for key, layer in one.items():
        assert_equal(two[key], {name: getattr(layer, name) for name in PARAMETERS})
        assert layer.w13_bias is None or torch.equal(layer.w13_bias, two[key].w13_bias)


@pytest.mark.parametrize(
    "spelling", ["_scale", ".weight_scale", "_weight_scale"], ids=["transformers", "linear", "weight_scale"]
)
@pytest.mark.parametrize("scales", ["channel", "flat", "tensor"])
def test_fused_int8_scales_of_every_shape_and_name(tmp_path: Path, spelling: str, scales: str) -> None:
    shape: Callable[[int], tuple[int, ...]] = {
        "channel": lambda n: (n, 1), "flat": lambda n: (n,), "tensor": lambda n: (1,)
    }[scales]  # fmt: skip
    stored = tensors(scale_shape=shape)
    if scales == "tensor":  # a fused tensor has one scale for gate and up
        for name in [name for name in stored if "up_proj.weight_scale" in name]:
            stored[name] = stored[name.replace("up_proj", "gate_proj")].clone()
    fused = fuse(stored)
    if scales == "tensor":
        fused = {k: v[:, :1].clone() if k.endswith("gate_up_proj_scale") else v for k, v in fused.items()}
    on_disk = {k.removesuffix("_scale") + spelling if k.endswith("proj_scale") else k: v for k, v in fused.items()}
    strategy = "tensor" if scales == "tensor" else "channel"
    quants: list[dict[str, Any] | None] = [
        quantization(group({"strategy": strategy})),
        quantization(group({"strategy": strategy}, targets=["re:.*mlp.experts.*"])),
        None,
    ]
    for number, quant in enumerate(quants):
        folder = write(tmp_path / str(number), config(quant=quant), on_disk)
        for index, layer in enumerate(load_moe_layers(folder, kernel="reference.torch").values()):
            assert_equal(layer, expected(stored, "qwen3_moe", index))


def test_a_fused_tensor_whose_experts_differ_in_the_config(tmp_path: Path) -> None:
    ignored = quantization(ignore=[f"{KEY.format(1)}.3.up_proj"])
    text = refusal(write(tmp_path / "a", config(quant=ignored), fuse(tensors())))
    assert f"{KEY.format(1)}: gate_up_proj: I8 weights, but quantization_config leaves them unquantised" in text
    mixed = quantization(group(), group({"strategy": "tensor"}, targets=["re:.*experts.3.*"]))
    text = refusal(write(tmp_path / "b", config(quant=mixed), fuse(tensors())))
    assert "gives its experts different strategies" in text


def test_fused_damage_is_named(tmp_path: Path) -> None:
    def changed(folder: str, name: str, value: Tensor | None) -> str:
        stored = fuse(tensors())
        stored = {k: v for k, v in stored.items() if k != name} if value is None else {**stored, name: value}
        return refusal(write(tmp_path / folder, config(quant=quantization()), stored))

    gate_up, scale = f"{KEY.format(0)}.gate_up_proj", f"{KEY.format(0)}.gate_up_proj_scale"
    assert f"{scale} is not in model.safetensors" in changed("a", scale, None)
    nan = fuse(tensors())[scale].clone()
    nan[5, 3] = float("nan")
    assert f"{scale} (expert 5, in model.safetensors) holds nan in 1 of 16 places" in changed("b", scale, nan)
    assert "[8, 32, 31], not [8, 32, 32], for gate_up_proj" in changed("c", gate_up, torch.zeros(8, 32, 31).char())
    few = changed("d", gate_up, torch.zeros(7, 32, 32).char())
    assert "[7, 32, 32], not [8, 32, 32], for gate_up_proj (config.json: hidden_size 32" in few
    assert "[8, 32, 2], not [8, 32, 1] or [8, 32] (strategy channel), for gate_up_proj_scale" in changed(
        "e", scale, torch.ones(8, 32, 2)
    )


def test_biases_are_wanted_exactly_where_the_model_has_them(tmp_path: Path) -> None:
    biased = with_biases(tensors())
    text = refusal(write(tmp_path / "a", config(quant=quantization()), biased))
    assert "bias of experts 0-7" in text
    assert "this model has no biases" in text
    lacking = {k: v for k, v in biased.items() if not k.endswith("3.up_proj.bias")}
    text = refusal(write(tmp_path / "b", model_config("gpt_oss", quantization()), lacking))
    assert "expert 3 lacks up_proj.bias in model.safetensors" in text
    biased[f"{KEY.format(1)}.4.down_proj.bias"][7] = float("inf")
    text = refusal(write(tmp_path / "c", model_config("gpt_oss", quantization()), biased))
    assert "experts.4.down_proj.bias (expert 4, in model.safetensors) holds inf in 1 of 32 places" in text


def test_a_layer_that_quark_or_modelslim_excludes_stays_unquantised(tmp_path: Path) -> None:
    floats = {k: v for k, v in tensors(quantized=False).items() if ".layers.0." in k}
    stored = {**tensors(), **floats}
    stored = {k: v for k, v in stored.items() if k in floats or ".layers.0." not in k}
    spec_of_none = {"*layers.0.*": {"weight": None}}
    for number, quant in enumerate(
        (quark(exclude=["*layers.0.*"]), quark(layer_quant_config=spec_of_none), {**W8A8_INT8, "ignore": ["re:.*layers.0.*"]},
         {**W8A8_INT8, "modules_to_not_convert": ["layers.0"]})
    ):  # fmt: skip
        plan = inspect_checkpoint(write(tmp_path / str(number), config(quant=quant), stored))
        assert [layer.quantized for layer in plan.layers] == [False, True]
        # What the config leaves alone may not be int8.
        text = refusal(write(tmp_path / f"int8 {number}", config(quant=quant), tensors()))
        assert f"{KEY.format(0)}: " in text
        assert KEY.format(1) not in text
        assert "leaves them unquantised" in text
    described = {**description(stored), **dict.fromkeys(floats, "FLOAT")}
    plan = inspect_checkpoint(write_modelslim(tmp_path / "slim", config(), described, stored))
    assert [layer.quantized for layer in plan.layers] == [False, True]


REFUSED_CONFIGS = {
    "w8a8_int8 blocks": ({**W8A8_INT8, "weight_block_size": [128, 128]}, "block weight scales (size [128, 128])"),
    "w8a8_int8 groups": ({**W8A8_INT8, "group_size": 64}, "group weight scales (size 64)"),
    "w8a8_int8 static": ({**W8A8_INT8, "activation_scheme": "static"}, "static activation scales"),
    "w8a8_int8 4 bit": ({**W8A8_INT8, "bits": 4}, "4 bit weights"),
    "w8a8_int8 asymmetric": ({**W8A8_INT8, "symmetric": False}, "asymmetric weights"),
    "blockwise_int8": (
        {"quant_method": "blockwise_int8", "weight_block_size": [128, 128]},
        "quant_method 'blockwise_int8' (weight_block_size [128, 128])",
    ),
    "quark groups": (quark({"qscheme": "per_group", "group_size": 32}), "group weight scales (size 32)"),
    "quark static": (quark(inputs={"is_dynamic": False}), "static activation scales"),
    "quark per tensor activations": (quark(inputs={"qscheme": "per_tensor"}), "dynamic activation scales per_tensor"),
    "quark asymmetric": (quark({"symmetric": False}), "asymmetric weights"),
    "quark asymmetric activations": (quark(inputs={"symmetric": False}), "asymmetric activations"),
    "quark 4 bit": (quark({"dtype": "int4"}), "4 bit weights (int4)"),
    "quark unsigned": (quark({"dtype": "uint8"}), "8 bit weights (uint8)"),
    "quark float8": (quark({"dtype": "fp8_e4m3"}), "float8 weights (fp8_e4m3)"),
    "quark columns": (quark({"ch_axis": 1}), "weight scales along axis 1"),
    "quark weights alone": (
        quark(global_quant_config={"weight": quark()["global_quant_config"]["weight"]}),
        "weights alone quantised (no input_tensors)",
    ),
    "quark empty": (quark(global_quant_config=None), "no global_quant_config"),
    "modelslim without its file": ({"quant_method": "modelslim"}, "needs quant_model_description.json beside it"),
}


@pytest.mark.parametrize("name", REFUSED_CONFIGS)
@pytest.mark.parametrize("model_type", ["qwen3_moe", "unheard_of"])
def test_what_a_config_cannot_have_is_refused_before_any_file_is_opened(
    tmp_path: Path, name: str, model_type: str
) -> None:
    quant, found = REFUSED_CONFIGS[name]
    text = refusal(write(tmp_path, config(quant=quant) | {"model_type": model_type}, None))
    assert found in text
    assert "config.json" in text
    assert "needs" in found or "supported: compressed-tensors int-quantized W8A8" in text


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        ("W8A8", "static activation scales (W8A8)"),
        ("W4A8_DYNAMIC", "4 bit weights (W4A8_DYNAMIC)"),
        ("W8A16", "16 bit activations (W8A16)"),
        ("W8A8_MIX", "weights of kind 'W8A8_MIX'"),
    ],
)
def test_kinds_of_modelslim_that_are_refused(tmp_path: Path, kind: str, found: str) -> None:
    stored = tensors()
    text = refusal(write_modelslim(tmp_path / "m", config(), description(stored, kind), stored))
    assert found in text
    assert "supported: compressed-tensors int-quantized W8A8" in text


def test_groups_of_other_modules_do_not_matter_to_modelslim_and_quark(tmp_path: Path) -> None:
    stored = tensors()
    described = {**description(stored), "model.layers.0.self_attn.q_proj.weight": "W8A8"}
    assert len(load_moe_layers(write_modelslim(tmp_path / "m", config(), described, stored))) == 2
    attention = {"*self_attn*": quark({"dtype": "int4"})["global_quant_config"]}
    folder = write(tmp_path / "q", config(quant=quark(layer_quant_config=attention)), float_scales(stored, flat=True))
    assert len(load_moe_layers(folder)) == 2


@pytest.mark.parametrize("suffix", ["weight_zero_point", "weight_offset"])
def test_offsets_that_are_not_zero_are_asymmetric(tmp_path: Path, suffix: str) -> None:
    stored = with_zeros(tensors(), suffix.removeprefix("weight_"), torch.float32)
    stored[f"{KEY.format(1)}.6.up_proj.{suffix}"][4] = 1
    text = refusal(write(tmp_path, config(), stored))
    assert f"experts.6.up_proj.{suffix} (expert 6) is not all zero (asymmetric weights)" in text


LOOKALIKES: dict[str, tuple[Callable[[], Stored], str]] = {
    "repack_moe: bf16 beside scales": (
        lambda: {
            **fuse(tensors(quantized=False)),
            **{f"{KEY.format(i)}.gate_up_proj_scale": torch.ones(EXPERTS, 16, 2) for i in range(2)},
        },
        "scales beside weights that are not quantised",
    ),
    "static activation scales": (
        lambda: {**tensors(), f"{KEY.format(0)}.0.up_proj.input_scale": torch.ones(1)},
        "static activation scales",
    ),
    "block scales": (
        lambda: {k.replace("_scale", "_scale_inv"): v for k, v in tensors().items()},
        "lack gate_proj.weight_scale",
    ),
    "group scales": (lambda: tensors(scale_shape=lambda n: (n, 2)), "[16, 2], not [16, 1] or [16]"),
    "int8 without scales": (
        lambda: {k: v for k, v in tensors().items() if not k.endswith("_scale")},
        "experts 0-7 lack gate_proj.weight_scale",
    ),
}


@pytest.mark.parametrize("name", LOOKALIKES)
def test_lookalikes_without_a_quantization_config_are_refused_from_headers(tmp_path: Path, name: str) -> None:
    stored, found = LOOKALIKES[name]
    folder = write(tmp_path, config(), stored())
    with pytest.raises(CheckpointError) as caught:
        inspect_checkpoint(folder)
    assert found in str(caught.value)
