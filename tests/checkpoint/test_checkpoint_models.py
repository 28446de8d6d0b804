"""Models beside the experts' bytes: unknown ones, prediction layers, dense layers, routing, routers, biased layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_builder import KEY, assert_equal, expected, quantization, refusal, tensors, write
from format_builder import MODELS, Stored, fuse, model_config, with_biases

import int8moe
from int8moe.checkpoint import inspect_checkpoint, load_moe_layers, load_router, load_router_biases
from int8moe.errors import CheckpointError

UNKNOWN = {
    "qwen-like": ("model.layers.{}.mlp.experts", "model.layers.{}.mlp.gate.weight"),
    "other prefix": ("language_model.model.layers.{}.ffn.experts", "language_model.model.layers.{}.ffn.gate.weight"),
}


@pytest.mark.parametrize("name", UNKNOWN)
@pytest.mark.parametrize("kind", ["int8", "int8 by names", "fused floats"])
def test_an_unknown_model_with_known_patterns(tmp_path: Path, name: str, kind: str) -> None:
    module, router = UNKNOWN[name]
    plain = tensors(quantized=kind != "fused floats")
    on_disk = fuse(plain) if kind == "fused floats" else plain
    renamed = {
        k.replace("model.layers.", module.partition("{}")[0]).replace(".mlp.", module.partition("{}")[2][:-7]): v
        for k, v in on_disk.items()
    }
    # Sizes stand in the tensors; only what they cannot show is in the config.
    configuration: dict[str, Any] = {"model_type": "unheard_of", "num_experts_per_tok": 3, "hidden_act": "gelu"}
    if kind == "int8":
        configuration["quantization_config"] = quantization()
    folder = write(tmp_path, configuration, renamed)
    plan = inspect_checkpoint(folder)
    assert plan.model_type == "unheard_of"
    assert plan.num_hidden_layers == 2
    layers = load_moe_layers(folder, kernel="reference.torch", quantize=True)
    assert list(layers) == [module.format(0), module.format(1)]
    for index, layer in enumerate(layers.values()):
        c = layer.config
        assert (c.num_experts, c.top_k, c.hidden_size, c.intermediate_size) == (8, 3, 32, 16)
        assert c.activation == "gelu"
        assert torch.equal(load_router(plan, index), renamed[router.format(index)].float())
        if kind != "fused floats":
            assert_equal(layer, expected(plain, "qwen3_moe", index))


def test_what_an_unknown_model_does_not_show_is_an_error(tmp_path: Path) -> None:
    stored = tensors()
    base = {"model_type": "unheard_of", "num_experts_per_tok": 2, "hidden_act": "silu"}

    def text(folder: str, fields: dict[str, Any], changed: Stored | None = None) -> str:
        return refusal(write(tmp_path / folder, {**base, **fields}, stored if changed is None else changed))

    assert "has no num_experts_per_tok" in text("a", {"num_experts_per_tok": None})
    assert "hidden_act None" in text("b", {"hidden_act": None})
    assert "num_experts is 9" in text("c", {"num_experts": 9})
    assert "[16, 32], not [16, 64]" in text("d", {"hidden_size": 64})
    assert "this model has no biases" in text("e", {}, with_biases(stored))
    lacking = {k: v for k, v in stored.items() if ".5.down_proj.weight_scale" not in k}
    assert "expert 5 lacks down_proj.weight_scale" in text("f", {}, lacking)
    other = {k.replace("_proj", "_matrix"): v for k, v in stored.items()}
    assert "no tensor is named like ...layers.0...experts.0.gate_proj.weight" in text("g", {}, other)
    transposed = fuse(tensors(quantized=False), transposed=True)
    assert "not [8, " in text("h", {"hidden_size": 32, "moe_intermediate_size": 16}, {
        k: v[:, :, :24].contiguous() if k.endswith("gate_up_proj") else v for k, v in transposed.items()
    })  # fmt: skip


def test_prediction_layers_of_every_kind_are_skipped(tmp_path: Path) -> None:
    stored = tensors()
    extra = {k.replace("model.layers.0", "model.layers.2"): v.clone() for k, v in stored.items() if ".layers.0." in k}
    drafts = {k.replace("model.layers.0", "mtp.layers.0"): v.clone() for k, v in stored.items() if ".layers.0." in k}
    folder = write(tmp_path, model_config("qwen3_next", quantization()), {**stored, **extra, **drafts})
    plan = inspect_checkpoint(folder)
    assert [(s.name, s.index, s.num_tensors) for s in plan.skipped] == [
        ("model.layers.2", 2, 48),
        ("mtp.layers.0", 0, 48),
    ]
    assert list(load_moe_layers(plan)) == [KEY.format(0), KEY.format(1)]


def test_dense_first_layers(tmp_path: Path) -> None:
    stored = {k: v for k, v in tensors().items() if ".layers.0.mlp" not in k}
    dense = {"model.layers.0.mlp.gate_proj.weight": torch.zeros(3, 3, dtype=torch.int8)}
    for model_type in ("deepseek_v2", "deepseek_v3", "glm4_moe"):
        fields = model_config(model_type, quantization(), first_k_dense_replace=1)
        plan = inspect_checkpoint(write(tmp_path / model_type, fields, {**stored, **dense}))
        assert [layer.index for layer in plan.layers] == [1]


def test_routing_of_every_model_type(tmp_path: Path) -> None:
    routing = {
        name: inspect_checkpoint(
            write(
                tmp_path / name,
                model_config(name, quantization(), routed_scaling_factor=2.5),
                with_biases(tensors())
                if name == "gpt_oss"
                else tensors("mixtral" if name == "mixtral" else "qwen3_moe"),
            )
        ).routing
        for name in MODELS
    }
    assert {name for name, r in routing.items() if r.scoring == "sigmoid"} == {"deepseek_v3", "glm4_moe"}
    assert {name for name, r in routing.items() if r.scaling_factor == 2.5} == {
        "deepseek_v2",
        "deepseek_v3",
        "glm4_moe",
    }
    assert (routing["deepseek_v3"].num_groups, routing["deepseek_v3"].topk_groups) == (4, 2)
    assert {name for name, r in routing.items() if r.num_groups > 1} == {"deepseek_v3"}
    assert {name for name, r in routing.items() if r.renormalize} == {
        "mixtral", "qwen3_next", "deepseek_v3", "glm4_moe", "gpt_oss"
    }  # fmt: skip


def test_the_biases_of_routers(tmp_path: Path) -> None:
    stored = with_biases(tensors())
    stored["model.layers.1.mlp.router.bias"] = torch.arange(8).bfloat16()
    for index in range(2):
        stored[f"model.layers.{index}.mlp.router.weight"] = stored.pop(f"model.layers.{index}.mlp.gate.weight")
    plan = inspect_checkpoint(write(tmp_path / "a", model_config("gpt_oss", quantization()), stored))
    bias, correction = load_router_biases(plan, 1)
    assert bias is not None
    assert torch.equal(bias, torch.arange(8).float())
    assert correction is None
    assert load_router_biases(plan, 0) == (None, None)
    stored = tensors()
    stored["model.layers.0.mlp.gate.e_score_correction_bias"] = torch.ones(8)
    stored["model.layers.1.mlp.gate.e_score_correction_bias"] = torch.ones(7)
    plan = inspect_checkpoint(write(tmp_path / "b", model_config("deepseek_v3", quantization()), stored))
    _, correction = load_router_biases(plan, 0)
    assert correction is not None
    assert torch.equal(correction, torch.ones(8))
    with pytest.raises(CheckpointError, match=r"e_score_correction_bias is F32 \[7\]; a router's bias has"):
        load_router_biases(plan, 1)


def test_a_biased_layer_runs_as_the_reference_does(tmp_path: Path) -> None:
    folder = write(tmp_path, model_config("gpt_oss", quantization()), with_biases(tensors()))
    ours, reference = (load_moe_layers(folder, kernel=name)[KEY.format(1)] for name in (None, "reference.torch"))
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(3))
    weights, ids = torch.full((5, 2), 0.5), torch.tensor([[0, 7], [1, 2], [3, 3], [4, 5], [6, 0]])
    assert isinstance(ours, int8moe.FusedMoE)
    assert torch.equal(ours(x, weights, ids), reference(x, weights, ids))
