"""config.json decides what is loaded, and refuses the rest before any safetensors file is opened."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_builder import KEY, config, group, quantization, tensors, write

from int8moe.checkpoint import inspect_checkpoint, load_moe_layers
from int8moe.checkpoint.families import FAMILIES
from int8moe.errors import CheckpointError

STATIC = {"dynamic": False, "strategy": "tensor"}

REFUSED = {
    "static activation scales": (quantization(group(activations=STATIC)), "static activation scales"),
    "static by omission": (
        quantization(group(input_activations={"num_bits": 8, "type": "int"})),
        "static activation scales",
    ),
    "group scales": (
        quantization(group({"strategy": "group", "group_size": 128})),
        "group weight scales (size 128)",
    ),
    "group scales by size": (quantization(group({"strategy": None, "group_size": 32})), "group weight scales"),
    "block scales": (
        quantization(group({"strategy": "block", "block_structure": [128, 128]})),
        "block weight scales",
    ),
    "asymmetric": (quantization(group({"symmetric": False})), "asymmetric weights"),
    "4 bit": (quantization(group({"num_bits": 4})), "4 bit weights"),
    "4 bit activations": (quantization(group(activations={"num_bits": 4})), "4 bit activations"),
    "float8": (
        quantization(group({"type": "float"}, {"type": "float"}), format="float-quantized"),
        "float8 weights",
    ),
    "float8 activations": (quantization(group(activations={"type": "float"})), "float8 activations"),
    "pack-quantized": (quantization(group(format="pack-quantized")), "format 'pack-quantized'"),
    "outer format": (
        quantization(group(format=None), format="pack-quantized"),
        "format 'pack-quantized'",
    ),
    "weight only": (quantization(group(input_activations=None)), "weights alone quantised"),
    "asymmetric activations": (
        quantization(group(activations={"symmetric": False})),
        "asymmetric activations",
    ),
    "activations per tensor": (
        quantization(group(activations={"strategy": "tensor"})),
        "dynamic activation scales per tensor",
    ),
    "sparse": (quantization(sparsity_config={"format": "sparse-24-bitmask"}), "sparse-24-bitmask"),
    "rotated": (quantization(transform_config={"config_groups": {"u": {}}}), "transform_config"),
    "output activations": (
        quantization(group(output_activations={"num_bits": 8})),
        "quantised output activations",
    ),
    "bitsandbytes": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        "quant_method 'bitsandbytes' (load_in_8bit True)",
    ),
    "torchao": ({"quant_method": "torchao", "quant_type": {"default": {}}}, "quant_method 'torchao'"),
    "gptq": ({"quant_method": "gptq", "bits": 4}, "quant_method 'gptq' (bits 4)"),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "quant_method 'fp8'"),
    "no method": ({"bits": 8}, "quant_method None"),
    "odd method": ({"quant_method": ["x"]}, "quant_method ['x']"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_in_one_line_before_any_tensor_is_read(tmp_path: Path, name: str) -> None:
    quant, found = REFUSED[name]
    folder = write(tmp_path, config(quant=quant), None)  # there is no safetensors file to open
    with pytest.raises(CheckpointError) as caught:
        load_moe_layers(folder)
    text = str(caught.value)
    assert found in text
    assert "supported: compressed-tensors int-quantized W8A8" in text
    assert "config.json" in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"model_type": "unheard_of", "swiglu_limit": 7.0}, "swiglu_limit 7.0 changes the activation"),
        ({"model_type": ""}, "model_type ''"),
        ({"model_type": None}, "no model_type"),
        ({"model_type": 5}, "model_type 5"),
        ({"num_experts": None}, "has no num_experts"),
        ({"num_experts": 0}, "has 0 for num_experts"),
        ({"num_experts": "8"}, "has '8' for num_experts"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, "damaged"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 exceeds num_experts 8"),
        ({"hidden_act": "tanh"}, "hidden_act 'tanh' is not supported"),
        ({"hidden_act": None}, "hidden_act None"),
        ({"hidden_size": 70_000_000_000}, "shape"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step 0"),
        ({"mlp_only_layers": 3}, "mlp_only_layers 3"),
        ({"mlp_only_layers": ["0"]}, "mlp_only_layers ['0']"),
        ({"mlp_only_layers": [False]}, "mlp_only_layers [False]"),
        ({"mlp_only_layers": [0.0]}, "mlp_only_layers [0.0]"),
        ({"mlp_only_layers": [None]}, "mlp_only_layers [None]"),
        ({"mlp_only_layers": [-1]}, "mlp_only_layers [-1]"),
        ({"decoder_sparse_step": "1"}, "decoder_sparse_step '1'"),
        ({"decoder_sparse_step": True}, "decoder_sparse_step True"),
        ({"mlp_layer_types": ["sparse"]}, "mlp_layer_types ['sparse']"),
        ({"mlp_layer_types": ["sparse", "moe"]}, "expected 'dense' or 'sparse' for each of the 2 layers"),
        ({"norm_topk_prob": "false"}, "has 'false' for norm_topk_prob; expected true or false"),
        ({"norm_topk_prob": 0}, "has 0 for norm_topk_prob"),
        ({"norm_topk_prob": []}, "has [] for norm_topk_prob"),
        ({"mlp_only_layers": [0, 1]}, "none of the 2 layers"),
        ({"quantization_config": "int8"}, "quantization_config is 'int8'"),
        ({"quantization_config": quantization(config_groups=None)}, "no config_groups"),
        ({"quantization_config": quantization(config_groups={"a": 3})}, "config_groups.a: found 3"),
        ({"quantization_config": quantization(ignore=["re:("])}, "not a valid pattern"),
        ({"quantization_config": quantization(ignore="lm_head")}, "ignore"),
        ({"quantization_config": quantization(group(targets=[1]))}, "targets"),
        ({"quantization_config": quantization(group(weights=None) | {"weights": 8})}, "weights: found 8"),
        ({"quantization_config": quantization(transform_config=[1])}, "transform_config: found [1]"),
    ],
)
def test_a_field_that_cannot_be_right_is_named(tmp_path: Path, fields: dict[str, Any], found: str) -> None:
    folder = write(tmp_path, config(quant=quantization()) | fields, tensors())
    with pytest.raises(CheckpointError) as caught:
        inspect_checkpoint(folder)
    assert found in str(caught.value)
    assert "\n" not in str(caught.value)


def test_groups_that_touch_no_expert_do_not_matter(tmp_path: Path) -> None:
    quant = quantization(
        group({"num_bits": 4, "strategy": "group"}, targets=["re:.*self_attn.*"]),
        group(targets=["re:.*experts.*"]),
    )
    assert inspect_checkpoint(write(tmp_path, config(quant=quant), tensors())).layers[0].quantized


def test_a_name_goes_before_a_pattern_and_that_before_a_class(tmp_path: Path) -> None:
    refused = group({"num_bits": 4})
    by_pattern = quantization(refused, group(targets=["re:.*experts.*"]))
    assert inspect_checkpoint(write(tmp_path / "a", config(quant=by_pattern), tensors())).layers[0].quantized
    one = quantization(
        group(targets=["re:.*experts.*"]),
        refused | {"targets": ["model.layers.1.mlp.experts.3.up_proj"]},
    )
    with pytest.raises(CheckpointError, match="4 bit weights in config group group_1"):
        inspect_checkpoint(write(tmp_path / "b", config(quant=one), tensors()))


LAYER_0 = [f"{KEY.format(0)}.{e}.{p}_proj" for e in range(8) for p in ("gate", "up", "down")]


@pytest.mark.parametrize("ignore", [["re:model.layers.0.*"], LAYER_0], ids=["pattern", "names"])
def test_an_ignored_layer_stays_unquantised_and_is_reported(
    tmp_path: Path, ignore: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    stored = tensors()
    floats = tensors(quantized=False)
    layer0 = {k: v for k, v in floats.items() if ".layers.0." in k}
    stored = {k: v for k, v in stored.items() if ".layers.0." not in k} | layer0
    folder = write(tmp_path, config(quant=quantization(ignore=ignore)), stored)
    with caplog.at_level(logging.INFO, "int8moe.checkpoint"):
        layers = load_moe_layers(folder)
    assert list(layers) == [KEY.format(1)]
    assert f"{KEY.format(0)} (BF16)" in caplog.text
    assert KEY.format(1) not in caplog.text
    assert [layer.quantized for layer in inspect_checkpoint(folder).layers] == [False, True]
    both = load_moe_layers(folder, quantize=True)
    assert list(both) == [KEY.format(0), KEY.format(1)]


def test_int8_weights_that_the_config_leaves_alone_contradict_it(tmp_path: Path) -> None:
    quant = quantization(ignore=["re:.*layers.1.*up_proj"])
    with pytest.raises(CheckpointError, match=r"layers\.1.*up_proj of experts 0-7: I8 weights, but quant"):
        load_moe_layers(write(tmp_path, config(quant=quant), tensors()))


def test_dense_layers_are_no_moe_layers(tmp_path: Path) -> None:
    stored = {k: v for k, v in tensors().items() if ".layers.0.mlp" not in k}
    for fields in ({"mlp_only_layers": [0]}, {"decoder_sparse_step": 2}, {"mlp_layer_types": ["dense", "sparse"]}):
        plan = inspect_checkpoint(write(tmp_path, config(quant=quantization(), **fields), stored))
        assert [layer.index for layer in plan.layers] == [1]
    with pytest.raises(CheckpointError, match=r"layer 0, which config\.json says is dense"):
        inspect_checkpoint(write(tmp_path, config(quant=quantization(), mlp_only_layers=[0]), tensors()))


@pytest.mark.parametrize(
    ("act", "activation"), [("silu", "silu"), ("gelu", "gelu"), ("gelu_pytorch_tanh", "gelu_tanh")]
)
def test_activation_and_routing_come_from_the_config(tmp_path: Path, act: str, activation: str) -> None:
    plan = inspect_checkpoint(write(tmp_path, config(quant=quantization(), hidden_act=act), tensors()))
    assert plan.layers[0].config.activation == activation
    assert (plan.routing.scoring, plan.routing.renormalize) == ("softmax", True)
    plain = config(quant=quantization(), norm_topk_prob=False)
    assert not inspect_checkpoint(write(tmp_path, plain, tensors())).routing.renormalize
    del plain["norm_topk_prob"]
    assert not inspect_checkpoint(write(tmp_path, plain, tensors())).routing.renormalize
    plain["norm_topk_prob"] = None
    assert not inspect_checkpoint(write(tmp_path, plain, tensors())).routing.renormalize
    mixtral = write(tmp_path, config("mixtral", quantization(), norm_topk_prob=False), tensors("mixtral"))
    assert inspect_checkpoint(mixtral).routing.renormalize


def test_num_experts_is_read_in_both_spellings(tmp_path: Path) -> None:
    fields = config(quant=quantization())
    fields["num_local_experts"] = fields.pop("num_experts")
    assert inspect_checkpoint(write(tmp_path, fields, tensors())).layers[0].config.num_experts == 8


def test_the_table_reads_its_own_names() -> None:
    for family in FAMILIES.values():
        for naming in family.namings:
            for role, name in naming.roles.items():
                tail = f".{name}" if naming.fused else f".3.{name}.weight"
                found = family.parse(naming.module.format(layer=12) + tail)
                assert found is not None
                assert found[0] is naming
                assert (found[1].layer, found[1].role, found[1].suffix) == (12, role, "weight")
        assert family.parse(f"{family.experts.format(layer=1)}.03.up_proj.weight") is None


def test_int8_activations_reach_the_kernel(tmp_path: Path) -> None:
    """W8A8, not weight-only: a change of the input below the quantisation step leaves the output as it was."""
    layer = load_moe_layers(write(tmp_path, config(quant=quantization()), tensors()))[KEY.format(0)]
    x = torch.linspace(-1, 1, 32).expand(1, 32).clone()
    nudged = x.clone()
    nudged[0, 5] += 1e-6
    weights, ids = torch.ones(1, 2), torch.tensor([[0, 3]])
    assert not torch.equal(x, nudged)
    assert torch.equal(layer(x, weights, ids), layer(nudged, weights, ids))
