"""Every sample checkpoint, loaded by from_pretrained, gives the logits that its authors computed, or is refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sample_checkpoints import changed_copy, load, logits_of, sample

from int8moe import FusedMoE, load_moe_layers
from int8moe.checkpoint import PackedCache, quantize_checkpoint
from int8moe.errors import CheckpointError, ConfigError
from int8moe.integrations.transformers.modules import QuantizedLinear

pytest.importorskip("transformers")

QUANTIZED = [
    "trained-qwen3moe-w8a8",
    "qwen3_moe-w8a8",
    "qwen2_moe-w8a8",
    "qwen3_moe-w8a8-layer0ignored",
    "qwen3_moe-w8a8-pertensor",
    "mixtral-w8a8",
    "mixtral-w8a8-w123",
    "micro-w8a8",
    "micro-w8a8-sharded",
    "deepseek_v3-w8a8",
    "gpt_oss-w8a8",
]
FLOAT = ["qwen3_moe-bf16", "qwen3_moe-bf16-fused3d", "mixtral-bf16", "micro-bf16", "deepseek_v3-bf16", "gpt_oss-bf16"]
REFUSED = {
    "qwen3_moe-w8a8-group32": "group weight scales",
    "qwen3_moe-w8a8-asymweight": "asymmetric weights",
    "bad-missing-scale": "expert 2 lacks up_proj.weight_scale",
    "bad-truncated-shard": "is truncated",
}

pytestmark = pytest.mark.usefixtures("enabled")


def relative_l2(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("name", QUANTIZED)
def test_logits(name: str) -> None:
    folder = sample(name)
    model, info = load(folder, output_loading_info=True)
    assert not any(info.values()), info
    reference = load_file(str(folder / "ref" / "reference.safetensors"))
    wanted = reference["logits_w8a8_fp32"]
    found = logits_of(model, reference["input_ids"])
    # The reference rounds x / s where ours multiplies by the inverse: now and then an activation is quantised to its
    # neighbour, and attention carries that on to all later tokens. Tokens before the first one agree to fp32 rounding;
    # the earliest one is met at the fifth token, of gpt_oss.
    errors = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert float(errors[:, :4].max()) < 2e-6
    assert relative_l2(found, wanted) < 0.05
    # What the bound is good for: activations that are not quantised miss it.
    if "logits_deq_fp32" in reference:
        exact = reference["logits_deq_fp32"]
        assert float(((exact - wanted).norm(dim=-1) / wanted.norm(dim=-1))[:, :4].max()) > 1e-3
    # In the checkpoint's own dtype it is the same model, to the noise of that dtype.
    assert relative_l2(logits_of(load(folder, dtype="auto"), reference["input_ids"]).float(), wanted) < 0.1


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_line(name: str) -> None:
    with pytest.raises(CheckpointError, match=REFUSED[name]) as caught:
        load(sample(name))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", FLOAT)
def test_float_experts_are_quantised_on_load(name: str) -> None:
    folder = sample(name)
    ids = torch.arange(48).reshape(2, 24)
    plain = logits_of(load(folder), ids)
    model = load(folder, experts_implementation="int8moe")
    quantized = logits_of(model, ids)
    assert 1e-4 < relative_l2(quantized, plain) < 0.1
    # The same experts, quantised in memory instead.
    later = load(folder)
    later.set_experts_implementation("int8moe")
    assert torch.equal(logits_of(later, ids), quantized)
    later.set_experts_implementation("eager")
    assert relative_l2(logits_of(later, ids), plain) < 1e-5


def test_a_layer_that_the_checkpoint_leaves_out_stays_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    folder = sample("qwen3_moe-w8a8-layer0ignored")
    with caplog.at_level(logging.WARNING, "int8moe"):
        model = load(folder)
    assert "left unquantised, in the experts of transformers: model.layers.0.mlp.experts (BF16)" in caplog.text
    first, second = (layer.mlp.experts for layer in model.model.layers)
    assert first.gate_up_proj.dtype == torch.float32
    assert isinstance(second.fused, FusedMoE)
    whole = load(folder, experts_implementation="int8moe")
    assert all(isinstance(layer.mlp.experts.fused, FusedMoE) for layer in whole.model.layers)


def test_weights_are_there_once() -> None:
    folder = sample("trained-qwen3moe-w8a8")
    model = load(folder, dtype="auto")
    stored = load_file(str(folder / "model.safetensors"))
    experts = sum(tensor.numel() for name, tensor in stored.items() if ".experts." in name and name.endswith("weight"))
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in [*model.parameters(), *model.buffers()]
        if tensor.dtype in (torch.int8, torch.uint8)
    }
    assert experts <= sum(storages.values()) < 1.05 * experts


def test_shared_experts_and_dense_layers_stay_quantised() -> None:
    model = load(sample("qwen2_moe-w8a8"))
    assert isinstance(model.model.layers[0].mlp.shared_expert.fused, FusedMoE)


@pytest.mark.parametrize(
    "name",
    ["mixtral-w8a8", "qwen2_moe-w8a8", "qwen3_moe-w8a8-layer0ignored", "qwen3_moe-w8a8-pertensor", "mixtral-bf16",
     "deepseek_v3-w8a8", "gpt_oss-w8a8", "gpt_oss-bf16"],
)  # fmt: skip
def test_save_and_load_again(name: str, tmp_path: Path) -> None:
    folder = sample(name)
    model = load(folder, **({"experts_implementation": "int8moe"} if name.endswith("bf16") else {}))
    ids = torch.arange(32).reshape(1, 32)
    before = logits_of(model, ids)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits_of(model, ids), before)  # saving did not disturb the model
    again = load(tmp_path)
    assert torch.equal(logits_of(again, ids), before)
    tensors = load_file(str(tmp_path / "model.safetensors"))
    scales = {key: value for key, value in tensors.items() if key.endswith("weight_scale")}
    assert scales
    for key, scale in scales.items():
        weight = tensors[key.removesuffix("_scale")]
        assert weight.dtype == torch.int8
        assert scale.shape == (weight.shape[0], 1)
    if name.startswith("mixtral"):
        assert "model.layers.0.block_sparse_moe.experts.3.w2.weight_scale" in scales
    elif not name.endswith("bf16"):  # whose experts lie in fused tensors
        assert set(tensors) == set(load_file(str(folder / "model.safetensors")))
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["format"]) == ("compressed-tensors", "int-quantized")


@pytest.mark.parametrize("name", ["gpt_oss-bf16", "qwen3_moe-bf16-fused3d", "mixtral-bf16", "deepseek_v3-bf16"])
def test_a_quantised_checkpoint_is_the_model_that_is_quantised_while_loading(name: str, tmp_path: Path) -> None:
    quantize_checkpoint(sample(name), tmp_path / "w8a8")
    ids = torch.arange(32).reshape(1, 32)
    written, info = load(tmp_path / "w8a8", output_loading_info=True)
    assert not any(info.values()), info
    assert torch.equal(logits_of(written, ids), logits_of(load(sample(name), experts_implementation="int8moe"), ids))
    for fused in (module for module in written.modules() if isinstance(module, FusedMoE)):
        assert (fused.w13_bias is not None and bool(fused.w13_bias.any())) == name.startswith("gpt_oss")


def test_the_base_model_alone() -> None:
    from transformers import AutoModel

    folder = sample("trained-qwen3moe-w8a8")
    reference = load_file(str(folder / "ref" / "reference.safetensors"))
    whole, base = load(folder), AutoModel.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        hidden = base(reference["input_ids"]).last_hidden_state
        assert torch.equal(whole.lm_head(hidden), whole(reference["input_ids"]).logits)


def test_other_devices_are_refused() -> None:
    from transformers import AutoConfig, modeling_utils

    config = AutoConfig.from_pretrained(sample("trained-qwen3moe-w8a8"))
    with pytest.raises(ConfigError, match="INT8 experts run on the CPU"):  # as from_pretrained(device_map=...) asks
        modeling_utils.get_hf_quantizer(config, None, {"": torch.device("meta")}, True, {})


def test_models_without_experts_are_left_to_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    assert not hasattr(AutoModelForCausalLM.from_pretrained(tmp_path), "hf_quantizer")


CONVERSIONS: dict[str, Callable[[torch.nn.Module], torch.nn.Module]] = {
    "to float16": lambda module: module.to(torch.float16),
    "to bfloat16": lambda module: module.to(torch.bfloat16),
    "to float64": lambda module: module.to(torch.float64),
    "half": lambda module: module.half(),
    "bfloat16": lambda module: module.bfloat16(),
    "type": lambda module: module.type(torch.float16),
    "there and back": lambda module: module.to(torch.bfloat16).to(torch.float32),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", CONVERSIONS)
def test_a_linear_keeps_its_integers_and_scales_in_every_dtype(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(6)
    module = QuantizedLinear("linear", torch.nn.Linear(512, 24, dtype=dtype))
    weight = torch.randint(-128, 128, (24, 512), dtype=torch.int8)
    weight[0] = 127  # with an x of ones its sum is beyond float16
    module.fill(weight, torch.rand(24) * 1e-3, dtype)
    x = torch.randn(5, 512)
    x[0] = 1.0
    scale, held, wanted = module.weight_scale.clone(), module.weight.dtype, module(x)
    assert CONVERSIONS[kind](module) is module
    assert torch.equal(module.weight.to(torch.int8), weight)
    assert module.weight.dtype == held
    assert module.weight_scale.dtype == torch.float32
    assert torch.equal(module.weight_scale, scale)
    assert module.bias is not None
    bound = 0.01 * float(module.bias.abs().max())  # the bias alone is rounded
    assert float((module(x) - wanted).abs().max()) <= bound
    module.to("meta")
    assert (module.weight.device.type, module.weight_scale.device.type) == ("meta", "meta")


@pytest.mark.parametrize("name", ["trained-qwen3moe-w8a8", "qwen3_moe-w8a8"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_loaded_model_is_the_same_in_another_dtype(name: str, dtype: torch.dtype) -> None:
    folder = sample(name)
    ids = torch.arange(24).reshape(1, 24)
    model = load(folder)
    wanted = logits_of(model, ids)
    assert any(isinstance(module, QuantizedLinear) for module in model.modules())
    assert relative_l2(logits_of(model.to(dtype), ids), wanted) < 0.05


def test_compile() -> None:
    model = load(sample("trained-qwen3moe-w8a8"))
    ids = torch.arange(100, 124).reshape(1, 24)
    wanted = logits_of(model, ids)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert relative_l2(compiled(ids, use_cache=False).logits, wanted) < 1e-5


def test_packed_layers_are_taken_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INT8MOE_CACHE_DIR", str(tmp_path))
    folder = sample("trained-qwen3moe-w8a8")
    ids = torch.arange(40).view(2, 20)
    wanted = logits_of(load(folder), ids)
    assert not list(tmp_path.iterdir()), "loading a model begins no cache"
    cache = PackedCache()
    load_moe_layers(folder, cache=cache)
    assert {outcome.state for outcome in cache.outcomes.values()} == {"written"}

    def read_experts(*arguments: object) -> None:
        raise AssertionError("experts are read from the checkpoint")

    monkeypatch.setattr("int8moe.checkpoint.load._load_layer", read_experts)
    assert torch.equal(logits_of(load(folder), ids), wanted)


def test_int8_experts_are_found_without_a_quantization_config(tmp_path: Path) -> None:
    folder = changed_copy("qwen3_moe-w8a8", tmp_path / "bare")
    wanted = logits_of(load(folder), torch.arange(20).view(1, 20))
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    assert torch.equal(logits_of(load(folder), torch.arange(20).view(1, 20)), wanted)
    config["quantization_config"] = {"quant_method": "ascend"}  # and no description file
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError):
        load(folder)


@pytest.mark.parametrize("module", ["model.embed_tokens", "model.layers.0.mlp.gate"])
def test_int8_that_nobody_reads_is_refused(tmp_path: Path, module: str) -> None:
    weight = load_file(str(sample("qwen3_moe-w8a8") / "model.safetensors"))[f"{module}.weight"]
    quantized = {f"{module}.weight": weight.to(torch.int8), f"{module}.weight_scale": torch.ones(len(weight), 1)}
    with pytest.raises(CheckpointError, match=rf"{module}.weight is int8, and the module that it belongs to is no"):
        load(changed_copy("qwen3_moe-w8a8", tmp_path / "orphan", **quantized))


def test_a_scale_without_its_weight_is_refused(tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.q_proj.weight"
    with pytest.raises(CheckpointError, match=rf"{name}_scale is stored, but no int8 {name}"):
        load(changed_copy("qwen3_moe-w8a8", tmp_path / "lost", **{name: None}))
