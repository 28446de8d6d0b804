"""Every sample checkpoint behaves as its README row says, and agrees with what its authors computed."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from checkpoint_builder import sample_checkpoints
from safetensors.torch import load_file

import int8moe
from int8moe.checkpoint import inspect_checkpoint, load_moe_layers
from int8moe.errors import CheckpointError

SAMPLES = sample_checkpoints()
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tiny-qwen3-moe-w8a8"


class Row(NamedTuple):
    """What happens to one directory: layers that load, layers left in bf16, or parts of the refusal."""

    loaded: tuple[int, ...] = ()
    floats: tuple[int, ...] = ()
    refused: tuple[str, ...] = ()


SUPPORTED = "supported: compressed-tensors int-quantized W8A8"
ROWS = {
    "trained-qwen3moe-w8a8": Row(loaded=(0, 1, 2, 3)),
    "trained-qwen3moe-bf16": Row(floats=(0, 1, 2, 3)),
    "qwen3_moe-w8a8": Row(loaded=(0, 1)),
    "qwen3_moe-w8a8-pertensor": Row(loaded=(0, 1)),
    "qwen3_moe-w8a8-layer0ignored": Row(loaded=(1,), floats=(0,)),
    "qwen3_moe-w8a8-group32": Row(refused=("group weight scales (size 32)", SUPPORTED)),
    "qwen3_moe-w8a8-asymweight": Row(refused=("asymmetric weights", SUPPORTED)),
    "qwen3_moe-bf16": Row(floats=(0, 1)),
    "qwen3_moe-bf16-fused3d": Row(floats=(0, 1)),
    "qwen2_moe-w8a8": Row(loaded=(0, 1)),
    "mixtral-w8a8": Row(loaded=(0, 1)),
    "mixtral-w8a8-w123": Row(loaded=(0, 1)),
    "mixtral-bf16": Row(floats=(0, 1)),
    "deepseek_v3-w8a8": Row(loaded=(1,)),
    "deepseek_v3-bf16": Row(floats=(1,)),
    "gpt_oss-w8a8": Row(loaded=(0, 1)),
    "gpt_oss-bf16": Row(floats=(0, 1)),
    "micro-w8a8": Row(loaded=(0,)),
    "micro-w8a8-sharded": Row(loaded=(0,)),
    "micro-bf16": Row(floats=(0,)),
    "bad-missing-scale": Row(refused=("model.safetensors", "expert 2 lacks up_proj.weight_scale")),
    "bad-truncated-shard": Row(
        refused=("model-00002-of-00003.safetensors is truncated", "up_proj.weight of experts 2-3")
    ),
}


def sample(name: str) -> Path:
    if name == "trained-qwen3moe-w8a8":  # the example of this repository: always tested
        return EXAMPLE
    if SAMPLES is None:
        pytest.skip("INT8MOE_TEST_CHECKPOINTS names no folder of sample checkpoints")
    folder = SAMPLES / name
    if not folder.is_dir():
        pytest.skip(f"{name} is not among the sample checkpoints")
    return folder


def key(index: int) -> str:
    return f"model.layers.{index}.mlp.experts"


def relative_l2(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def compare(folder: Path, layers: dict[str, int8moe.FusedMoE]) -> None:
    """Hold the layers against the authors' outputs of their routed experts."""
    reference = load_file(str(folder / "ref" / "reference.safetensors"))
    compared = 0
    for module, layer in layers.items():
        if f"moe.{module}.x" in reference:
            x, w, ids, y = (reference[f"moe.{module}.{part}"] for part in ("x", "w", "ids", "y"))
            assert relative_l2(layer(x, w, ids), y) < 2e-3
            # The bound can see a wrong layer: the same rows through other experts are far off.
            assert relative_l2(layer(x, w, (ids + 1) % layer.config.num_experts), y) > 0.1
            compared += 1
    assert compared


@pytest.mark.parametrize("name", ROWS)
def test_behaves_as_its_row_says(name: str, caplog: pytest.LogCaptureFixture) -> None:
    folder, row = sample(name), ROWS[name]
    if row.refused:
        with pytest.raises(CheckpointError) as caught:
            load_moe_layers(folder)
        for part in row.refused:
            assert part in str(caught.value)
        assert "\n" not in str(caught.value)
        return
    plan = inspect_checkpoint(folder)
    assert tuple(layer.index for layer in plan.layers if layer.quantized) == row.loaded
    assert all(layer.router is not None for layer in plan.layers)
    with caplog.at_level(logging.INFO, "int8moe.checkpoint"):
        layers = load_moe_layers(folder)
    assert list(layers) == [key(index) for index in row.loaded]
    for index in row.floats:
        assert f"{key(index)} (BF16)" in caplog.text
    if row.loaded:
        compare(folder, layers)
    if row.floats:
        assert list(load_moe_layers(folder, quantize=True)) == sorted(map(key, {*row.floats, *row.loaded}))


def test_every_directory_has_a_row() -> None:
    if SAMPLES is None:
        pytest.skip("INT8MOE_TEST_CHECKPOINTS names no folder of sample checkpoints")
    folders = {folder.name for folder in SAMPLES.iterdir() if (folder / "config.json").exists()}
    assert folders - set(ROWS) == set()


@pytest.mark.parametrize(
    ("one", "other"), [("mixtral-w8a8", "mixtral-w8a8-w123"), ("micro-w8a8", "micro-w8a8-sharded")]
)
def test_two_ways_of_writing_load_to_equal_tensors(one: str, other: str) -> None:
    first, second = (load_moe_layers(sample(name), kernel="reference.torch") for name in (one, other))
    assert list(first) == list(second)
    for module, layer in first.items():
        for parameter in ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale"):
            assert torch.equal(getattr(layer, parameter), getattr(second[module], parameter))


@pytest.mark.parametrize("name", ["qwen3_moe-bf16-fused3d", "gpt_oss-bf16"])
def test_fused_floats_are_quantised_as_quantize_experts_does(name: str) -> None:
    folder = sample(name)
    stored = load_file(str(folder / "model.safetensors"))
    for module, layer in load_moe_layers(folder, quantize=True, kernel="reference.torch").items():
        gate_up, down = stored[f"{module}.gate_up_proj"], stored[f"{module}.down_proj"]
        if name == "gpt_oss-bf16":
            gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
            gate_up = torch.cat([gate_up[:, 0::2], gate_up[:, 1::2]], dim=1)
            bias = stored[f"{module}.gate_up_proj_bias"].float()
            assert torch.equal(layer.w13_bias, torch.cat([bias[:, 0::2], bias[:, 1::2]], dim=1))
            assert torch.equal(layer.w2_bias, stored[f"{module}.down_proj_bias"].float())
        wanted = int8moe.quantize_experts(gate_up, down)
        names = ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale")
        for parameter, tensor in zip(names, wanted, strict=True):
            assert torch.equal(getattr(layer, parameter), tensor)


def test_the_int8_and_the_fused_float_gpt_oss_are_one_model() -> None:
    """The two directories were written from the same weights, in layouts that have nothing in common."""
    ours = load_moe_layers(sample("gpt_oss-bf16"), quantize=True, kernel="reference.torch")
    stored = load_moe_layers(sample("gpt_oss-w8a8"), kernel="reference.torch")
    for module, layer in ours.items():
        other = stored[module]
        for name in ("w13", "w2"):
            values, wanted = (
                getattr(one, f"{name}_weight").float() * getattr(one, f"{name}_weight_scale").unsqueeze(-1)
                for one in (layer, other)
            )
            assert relative_l2(values, wanted) < 0.02
            assert relative_l2(values, wanted.flip(1)) > 0.5
        assert torch.equal(layer.w13_bias, other.w13_bias)
        assert torch.equal(layer.w2_bias, other.w2_bias)
