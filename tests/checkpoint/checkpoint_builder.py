"""Writes tiny checkpoints in the formats that are read, to be damaged by the tests."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from int8moe import FusedMoE
from int8moe.checkpoint import load_moe_layers
from int8moe.errors import CheckpointError

HIDDEN, WIDTH, EXPERTS, LAYERS, TOP_K = 32, 16, 8, 2, 2

SPELLINGS = {
    "qwen3_moe": ("model.layers.{layer}.mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    "qwen2_moe": ("model.layers.{layer}.mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    "mixtral": ("model.layers.{layer}.block_sparse_moe.experts", ("gate_proj", "up_proj", "down_proj")),
    "mixtral-w123": ("model.layers.{layer}.block_sparse_moe.experts", ("w1", "w3", "w2")),
}

WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
ACTIVATIONS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}

KEY = "model.layers.{}.mlp.experts"


def group(weights: dict[str, Any] | None = None, activations: Any = None, **fields: Any) -> dict[str, Any]:
    """One config group: the supported one with changes."""
    return {
        "targets": ["Linear"],
        "format": "int-quantized",
        "weights": {**WEIGHTS, **(weights or {})},
        "input_activations": {**ACTIVATIONS, **(activations or {})},
        **fields,
    }


def quantization(*groups: dict[str, Any], ignore: list[str] | None = None, **fields: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors."""
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {f"group_{i}": g for i, g in enumerate(groups or (group(),))},
        "ignore": ["lm_head", "re:.*gate$"] if ignore is None else ignore,
        **fields,
    }


def config(model_type: str = "qwen3_moe", quant: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """A config.json."""
    mixtral = model_type.startswith("mixtral")
    values: dict[str, Any] = {
        "model_type": model_type.partition("-")[0],
        "hidden_size": HIDDEN,
        "hidden_act": "silu",
        "num_hidden_layers": LAYERS,
        "num_experts_per_tok": TOP_K,
        "num_local_experts" if mixtral else "num_experts": EXPERTS,
        "intermediate_size" if mixtral else "moe_intermediate_size": WIDTH,
    }
    if not mixtral:
        values |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    if quant is not None:
        values["quantization_config"] = quant
    return {**values, **fields}


def tensors(
    spelling: str = "qwen3_moe",
    *,
    quantized: bool = True,
    layers: int = LAYERS,
    scale_dtype: torch.dtype = torch.bfloat16,
    scale_shape: Callable[[int], tuple[int, ...]] = lambda rows: (rows, 1),
    float_dtype: torch.dtype = torch.bfloat16,
    hidden: int = HIDDEN,
    width: int = WIDTH,
    experts: int = EXPERTS,
) -> dict[str, Tensor]:
    """Seeded tensors by name; the same numbers for every spelling."""
    generator = torch.Generator().manual_seed(7)
    module, projections = SPELLINGS[spelling]
    out: dict[str, Tensor] = {"lm_head.weight": torch.zeros(4, hidden)}
    for layer in range(layers):
        base = module.format(layer=layer)
        out[f"{base.removesuffix('.experts')}.gate.weight"] = torch.randn(
            experts, hidden, generator=generator
        ).bfloat16()
        for expert in range(experts):
            for name, shape in zip(projections, ((width, hidden), (width, hidden), (hidden, width)), strict=True):
                key = f"{base}.{expert}.{name}"
                if quantized:
                    out[f"{key}.weight"] = torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
                    scale = torch.rand(scale_shape(shape[0]), generator=generator) * 0.01 + 1e-3
                    out[f"{key}.weight_scale"] = scale.to(scale_dtype)
                else:
                    out[f"{key}.weight"] = torch.randn(shape, generator=generator).to(float_dtype)
    return out


def write(folder: Path, configuration: dict[str, Any], stored: dict[str, Tensor] | None, shards: int = 1) -> Path:
    """Write a checkpoint; None = config.json alone."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(configuration))
    if stored is None:
        return folder
    if shards == 1:
        save_file(stored, str(folder / "model.safetensors"))
        return folder
    weight_map, names = {}, sorted(stored)
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: stored[name] for name in names[i::shards]}
        save_file(part, str(folder / file))
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


PARAMETERS = ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale")


def expected(stored: dict[str, Tensor], spelling: str, layer: int) -> dict[str, Tensor]:
    """The canonical tensors of a layer, put together without the code under test."""
    module, (gate, up, down) = SPELLINGS[spelling]
    base = module.format(layer=layer)

    def stack(projection: str, suffix: str) -> Tensor:
        return torch.stack([stored[f"{base}.{e}.{projection}.{suffix}"] for e in range(EXPERTS)])

    def scales(projection: str, rows: int) -> Tensor:
        scale = stack(projection, "weight_scale").float().reshape(EXPERTS, -1)
        return scale.expand(EXPERTS, rows)

    return {
        "w13_weight": torch.cat([stack(gate, "weight"), stack(up, "weight")], dim=1),
        "w13_weight_scale": torch.cat([scales(gate, WIDTH), scales(up, WIDTH)], dim=1),
        "w2_weight": stack(down, "weight"),
        "w2_weight_scale": scales(down, HIDDEN),
    }


def assert_equal(layer: FusedMoE, wanted: dict[str, Tensor]) -> None:
    for parameter in PARAMETERS:
        found = getattr(layer, parameter)
        assert found.dtype == wanted[parameter].dtype
        assert torch.equal(found.reshape(wanted[parameter].shape), wanted[parameter]), parameter


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_moe_layers(folder)
    text = str(caught.value)
    assert "\n" not in text
    assert str(folder) in text
    return text


def sample_checkpoints() -> Path | None:
    """The folder of sample checkpoints that INT8MOE_TEST_CHECKPOINTS names, if any."""
    named = os.environ.get("INT8MOE_TEST_CHECKPOINTS")
    return Path(named) if named else None
