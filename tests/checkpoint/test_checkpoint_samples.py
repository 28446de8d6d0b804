"""Every sample checkpoint behaves as its README row says, and agrees with what its authors computed."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from checkpoint_builder import sample_checkpoints
from safetensors.torch import load_file

from int8moe.checkpoint import inspect_checkpoint, load_moe_layers
from int8moe.errors import CheckpointError

SAMPLES = sample_checkpoints()
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tiny-qwen3-moe-w8a8"

LOADED = {
    "trained-qwen3moe-w8a8": [0, 1, 2, 3],
    "qwen3_moe-w8a8": [0, 1],
    "qwen2_moe-w8a8": [0, 1],
    "qwen3_moe-w8a8-layer0ignored": [1],
    "qwen3_moe-w8a8-pertensor": [0, 1],
    "mixtral-w8a8": [0, 1],
    "mixtral-w8a8-w123": [0, 1],
    "micro-w8a8": [0],
    "micro-w8a8-sharded": [0],
}
UNQUANTISED = {
    "trained-qwen3moe-bf16": [0, 1, 2, 3],
    "qwen3_moe-bf16": [0, 1],
    "qwen3_moe-bf16-fused3d": [0, 1],
    "mixtral-bf16": [0, 1],
    "micro-bf16": [0],
    "qwen3_moe-w8a8-layer0ignored": [0],
}
REFUSED = {
    "qwen3_moe-w8a8-group32": ["group weight scales (size 32)", "supported: compressed-tensors int-quantized"],
    "qwen3_moe-w8a8-asymweight": ["asymmetric weights", "supported: compressed-tensors int-quantized"],
    "bad-missing-scale": ["model.safetensors", "experts 2 lack up_proj.weight_scale"],
    "bad-truncated-shard": ["model-00002-of-00003.safetensors is truncated", "up_proj.weight of experts 2-3"],
    "deepseek_v3-w8a8": ["model_type 'deepseek_v3' is not supported yet; supported: mixtral, qwen2_moe, qwen3_moe"],
    "deepseek_v3-bf16": ["model_type 'deepseek_v3' is not supported yet"],
    "gpt_oss-w8a8": ["model_type 'gpt_oss' is not supported yet"],
    "gpt_oss-bf16": ["model_type 'gpt_oss' is not supported yet"],
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


@pytest.mark.parametrize("name", LOADED)
def test_loads_and_agrees_with_its_reference(name: str) -> None:
    folder = sample(name)
    layers = load_moe_layers(folder)
    assert list(layers) == [key(index) for index in LOADED[name]]
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


@pytest.mark.parametrize("name", UNQUANTISED)
def test_unquantised_layers_are_named_and_quantised_when_asked(name: str, caplog: pytest.LogCaptureFixture) -> None:
    folder = sample(name)
    with caplog.at_level(logging.INFO, "int8moe.checkpoint"):
        left = load_moe_layers(folder)
    assert list(left) == [key(index) for index in LOADED.get(name, [])]
    for index in UNQUANTISED[name]:
        assert f"{key(index)} (BF16)" in caplog.text
    layers = load_moe_layers(folder, quantize=True)
    assert list(layers) == sorted(map(key, {*UNQUANTISED[name], *LOADED.get(name, [])}))


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_moe_layers(sample(name))
    for part in REFUSED[name]:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("one", "other"), [("mixtral-w8a8", "mixtral-w8a8-w123"), ("micro-w8a8", "micro-w8a8-sharded")]
)
def test_two_ways_of_writing_load_to_equal_tensors(one: str, other: str) -> None:
    first, second = (load_moe_layers(sample(name), kernel="reference.torch") for name in (one, other))
    assert list(first) == list(second)
    for module, layer in first.items():
        for parameter in ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale"):
            assert torch.equal(getattr(layer, parameter), getattr(second[module], parameter))


def test_per_expert_and_fused_floats_quantise_to_equal_layers() -> None:
    """The fused directory has weights of its own: each is held against quantize_experts of what it stores."""
    import int8moe

    folder = sample("qwen3_moe-bf16-fused3d")
    stored = load_file(str(folder / "model.safetensors"))
    for module, layer in load_moe_layers(folder, quantize=True, kernel="reference.torch").items():
        wanted = int8moe.quantize_experts(stored[f"{module}.gate_up_proj"], stored[f"{module}.down_proj"])
        names = ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale")
        for parameter, tensor in zip(names, wanted, strict=True):
            assert torch.equal(getattr(layer, parameter), tensor)


@pytest.mark.parametrize("name", sorted({*LOADED, *UNQUANTISED}))
def test_inspection_says_what_loading_says(name: str) -> None:
    plan = inspect_checkpoint(sample(name))
    assert [layer.index for layer in plan.layers if layer.quantized] == LOADED.get(name, [])
    assert all(layer.router is not None for layer in plan.layers)
