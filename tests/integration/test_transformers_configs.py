"""What a config or from_pretrained says, and the files say otherwise: honoured, or refused in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sample_checkpoints import change_config, changed_copy, load, logits_of, sample

from int8moe import FusedMoE
from int8moe.checkpoint import PackedCache, load_moe_layers
from int8moe.errors import CheckpointError, Int8MoEError
from int8moe.integrations.transformers.modules import QuantizedExperts, QuantizedLinear, QuantizedMLP

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("enabled")

IDS = torch.arange(24).reshape(1, 24)


def refusal(folder: Path, **options: Any) -> str:
    """The one line by which a checkpoint is refused; no weight has been read then."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.modeling_utils.PreTrainedModel._load_pretrained_model", read_anyway)
        with pytest.raises(Int8MoEError) as caught:
            load(folder, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def read_anyway(*arguments: object, **options: object) -> None:
    raise AssertionError("weights are read")


# ---- which files -------------------------------------------------------------------------------------------------


def test_files_other_than_those_that_are_read_are_refused(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sample("qwen3_moe-w8a8"), tmp_path / "model"))
    shutil.copy(folder / "model.safetensors", folder / "model.x.safetensors")
    text = refusal(folder, variant="x")
    assert "is to read model.x.safetensors, and INT8 experts are read from model.safetensors; leave out variant" in text
    torch.save({}, folder / "pytorch_model.bin")
    assert "is to read pytorch_model.bin" in refusal(folder, use_safetensors=False)


@pytest.mark.parametrize("name", ["qwen3_moe-w8a8", "micro-w8a8-sharded", "qwen3_moe-bf16"])
@pytest.mark.parametrize("configured", [True, False])
def test_each_header_is_read_once(name: str, configured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from int8moe.checkpoint import files

    monkeypatch.setenv("INT8MOE_CACHE_DIR", str(tmp_path / "none"))
    folder = Path(shutil.copytree(sample(name), tmp_path / "model"))
    if not configured:
        change_config(folder, quantization_config=None)
    read: list[str] = []
    original = files._read_header
    monkeypatch.setattr(files, "_read_header", lambda file: (read.append(file.name), original(file))[1])
    load(folder, experts_implementation="int8moe")
    assert sorted(read) == sorted(file.name for file in folder.glob("*.safetensors"))


# ---- config groups of what is no expert --------------------------------------------------------------------------

SCHEME = {"num_bits": 8, "type": "int", "symmetric": True}
WEIGHTS = {**SCHEME, "strategy": "channel", "dynamic": False}
ACTIVATIONS = {**SCHEME, "strategy": "token", "dynamic": True}


def with_attention_group(
    folder: Path, weights: dict[str, Any] | None = None, activations: dict[str, Any] | None = None
) -> Path:
    """A checkpoint whose attention is in a config group of its own: the served one with changes; None = no activations."""
    shutil.copytree(sample("qwen3_moe-w8a8"), folder)
    quantization = json.loads((folder / "config.json").read_text())["quantization_config"]
    experts = next(iter(quantization["config_groups"].values()))
    quantization["config_groups"] = {
        "group_0": {**experts, "targets": ["re:.*mlp.*"]},
        "group_1": {
            "targets": ["re:.*self_attn.*"],
            "weights": {**WEIGHTS, **(weights or {})},
            "input_activations": None if activations is None else {**ACTIVATIONS, **activations},
        },
    }
    change_config(folder, quantization_config=quantization)
    return folder


UNSERVED: dict[str, tuple[dict[str, Any], dict[str, Any] | None, str]] = {
    "group scales": ({"strategy": "group", "group_size": 32}, {}, "strategy group), and has group weight scales (size 32)"),
    "group scales, weights alone": ({"strategy": "group", "group_size": 32}, None, "group weight scales (size 32)"),
    "block scales": ({"strategy": "block", "block_structure": [16, 16]}, {}, "block weight scales"),
    "4 bit": ({"num_bits": 4}, None, "4 bit weights"),
    "asymmetric": ({"symmetric": False}, {}, "asymmetric weights (zero points)"),
    "static activations": ({}, {"dynamic": False, "strategy": "tensor"}, "static activation scales"),
    "asymmetric activations": ({}, {"symmetric": False}, "asymmetric activations"),
    "activations by tensor": ({}, {"strategy": "tensor"}, "dynamic activation scales per tensor"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNSERVED)
def test_a_group_of_attention_that_is_not_served_is_refused(case: str, tmp_path: Path) -> None:
    weights, activations, text = UNSERVED[case]
    found = refusal(with_attention_group(tmp_path / "model", weights, activations))
    assert "model.layers.0.self_attn.q_proj is in config group group_1 (strategy " in found
    assert text in found


def test_weights_that_are_quantised_alone_are_dequantised(tmp_path: Path) -> None:
    stored = load_file(str(sample("qwen3_moe-w8a8") / "model.safetensors"))
    quantised = load(sample("qwen3_moe-w8a8"))
    model = load(with_attention_group(tmp_path / "model"))
    attention = model.model.layers[0].self_attn
    for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
        linear, name = getattr(attention, part), f"model.layers.0.self_attn.{part}.weight"
        assert type(linear) is torch.nn.Linear
        wanted = stored[name].float() * stored[f"{name}_scale"].float().reshape(-1, 1)
        assert torch.equal(linear.weight, wanted)
    assert isinstance(model.model.layers[0].mlp.experts.fused, FusedMoE)
    logits = logits_of(model, IDS)
    assert not torch.equal(logits, logits_of(quantised, IDS))  # here activations are quantised
    model.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert torch.equal(logits_of(again, IDS), logits)
    half = load(tmp_path / "model", dtype=torch.bfloat16)
    assert half.model.layers[0].self_attn.q_proj.weight.dtype == torch.bfloat16


def test_int8_that_the_config_leaves_unquantised_is_refused(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sample("qwen3_moe-w8a8"), tmp_path / "model"))
    quantization = json.loads((folder / "config.json").read_text())["quantization_config"]
    quantization["ignore"] = [*quantization["ignore"], "re:.*self_attn.*"]
    change_config(folder, quantization_config=quantization)
    assert "quantization_config leaves model.layers.0.self_attn.q_proj unquantised" in refusal(folder)


@pytest.mark.parametrize("suffix", ["weight_zero_point", "weight_offset"])
def test_zero_points_and_offsets_are_both_checked(suffix: str, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj"
    rows = len(load_file(str(sample("qwen3_moe-w8a8") / "model.safetensors"))[f"{name}.weight"])
    zeros = {f"{name}.{part}": torch.zeros(rows, 1) for part in ("weight_zero_point", "weight_offset")}
    load(changed_copy("qwen3_moe-w8a8", tmp_path / "zero", **zeros))
    zeros[f"{name}.{suffix}"][3] = 1.0
    with pytest.raises(CheckpointError, match=rf"{name}.{suffix} is not all zero"):
        load(changed_copy("qwen3_moe-w8a8", tmp_path / "asymmetric", **zeros))


def test_floats_where_the_config_says_int8_are_refused(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sample("qwen3_moe-bf16"), tmp_path / "model"))
    quantization = json.loads((sample("qwen3_moe-w8a8") / "config.json").read_text())["quantization_config"]
    change_config(folder, quantization_config=quantization)
    text = refusal(folder)
    assert "floats where quantization_config says int8: model.layers.0.mlp.experts: BF16 in" in text
    assert "take quantization_config out of config.json" in text
    quantization["ignore"] = [*quantization["ignore"], "re:.*experts.*"]
    change_config(folder, quantization_config=quantization)
    load(folder)  # as the ignore list says


# ---- settings of the model ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["from_pretrained", "config"])
def test_experts_a_token_may_be_another_number(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoConfig

    monkeypatch.setenv("INT8MOE_CACHE_DIR", str(tmp_path / "cache"))
    folder = sample("qwen3_moe-w8a8")
    changed = Path(shutil.copytree(folder, tmp_path / "model"))
    top_k = change_config(changed)["num_experts_per_tok"] + 1
    change_config(changed, num_experts_per_tok=top_k)
    wanted = logits_of(load(changed), IDS)
    cache = PackedCache()
    load_moe_layers(folder, cache=cache)
    if where == "config":
        options = {"config": AutoConfig.from_pretrained(folder, num_experts_per_tok=top_k)}
    else:
        options = {"num_experts_per_tok": top_k}
    times = {outcome.file: outcome.file.stat().st_mtime_ns for outcome in cache.outcomes.values()}
    found = logits_of(load(folder, **options), IDS)
    assert torch.equal(found, wanted)
    assert not torch.equal(found, logits_of(load(folder), IDS))
    assert {file: file.stat().st_mtime_ns for file in times} == times  # packed layers serve any number
    for wrong in (0, 1000):
        assert f"num_experts_per_tok is {wrong}; allowed are 1 to" in refusal(folder, num_experts_per_tok=wrong)


@pytest.mark.parametrize(
    ("name", "field", "value", "said"),
    [
        ("qwen3_moe-w8a8", "hidden_act", "gelu", "activation gelu"),
        ("qwen3_moe-w8a8", "moe_intermediate_size", 32, "intermediate_size 32"),
        ("qwen3_moe-w8a8", "num_experts", 4, "num_experts 4"),
        ("gpt_oss-w8a8", "swiglu_limit", 2.0, "swiglu_limit 2.0"),
        ("gpt_oss-w8a8", "swiglu_alpha", 1.0, "swiglu_alpha 1.0"),
    ],
)
def test_what_would_be_other_experts_is_refused(name: str, field: str, value: object, said: str) -> None:
    text = refusal(sample(name), **{field: value})
    assert f"model.layers.0.mlp.experts has {said} in this" in text


def test_a_gate_that_nobody_knows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    monkeypatch.setattr(Qwen3MoeExperts, "_apply_gate", lambda self, gate_up: gate_up.chunk(2, dim=-1)[0])
    assert "Qwen3MoeExperts has a gate of its own" in refusal(sample("qwen3_moe-w8a8"))


def test_an_mlp_that_does_more_keeps_its_structure(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeMLP

    folder = sample("qwen2_moe-w8a8")
    plain = load(folder)
    assert any(isinstance(module, QuantizedMLP) for module in plain.modules())
    own = Qwen2MoeMLP.forward
    monkeypatch.setattr(Qwen2MoeMLP, "forward", lambda self, x: own(self, x) * 0.5)
    model = load(folder)
    assert not any(isinstance(module, QuantizedMLP) for module in model.modules())
    shared = model.model.layers[0].mlp.shared_expert
    assert isinstance(shared.gate_proj, QuantizedLinear)
    x = torch.randn(3, shared.gate_proj.in_features)
    with torch.inference_mode():
        assert torch.allclose(shared(x), plain.model.layers[0].mlp.shared_expert(x) * 0.5, rtol=0.02, atol=0.02)


# ---- the base model alone, and state dicts -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["qwen3_moe-w8a8", "mixtral-w8a8", "qwen2_moe-w8a8", "gpt_oss-w8a8", "deepseek_v3-w8a8"]
)
def test_the_base_model_saved_alone_loads_again(name: str, tmp_path: Path) -> None:
    from transformers import AutoModel

    base = AutoModel.from_pretrained(sample(name), dtype=torch.float32)
    base.save_pretrained(tmp_path)
    names = set(load_file(str(tmp_path / "model.safetensors")))
    assert not any(key.startswith("model.") for key in names)
    again, info = AutoModel.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    with torch.inference_mode():
        assert torch.equal(again(IDS).last_hidden_state, base(IDS).last_hidden_state)
    quantised = [module for module in again.modules() if isinstance(module, (QuantizedExperts, QuantizedLinear))]
    assert len(quantised) == sum(isinstance(m, (QuantizedExperts, QuantizedLinear)) for m in base.modules())
    assert len(load_moe_layers(tmp_path)) == len(load_moe_layers(sample(name)))
    # A whole model of it has all but its head.
    whole, info = load(tmp_path, output_loading_info=True)
    assert info["missing_keys"] <= {"lm_head.weight"}
    with torch.inference_mode():
        assert torch.equal(whole.base_model(IDS).last_hidden_state, base(IDS).last_hidden_state)


def test_state_dict_round_trip() -> None:
    first, second = load(sample("qwen2_moe-w8a8")), load(sample("qwen2_moe-w8a8"))
    wanted = logits_of(first, IDS)
    for module in second.modules():
        if isinstance(module, QuantizedLinear):
            module.weight.zero_()
            module.weight_scale.zero_()
    assert not torch.equal(logits_of(second, IDS), wanted)
    second.load_state_dict(first.state_dict())
    assert torch.equal(logits_of(second, IDS), wanted)
    first.load_state_dict(first.state_dict())
    assert torch.equal(logits_of(first, IDS), wanted)


def test_a_linear_that_is_empty_takes_a_state_dict() -> None:
    torch.manual_seed(0)
    source = torch.nn.Linear(3000, 8)
    filled, empty = QuantizedLinear("a", source), QuantizedLinear("b", torch.nn.Linear(3000, 8))
    filled.fill(torch.full((8, 3000), 127, dtype=torch.int8), torch.rand(8), torch.float32)
    empty.load_state_dict(filled.state_dict())
    x = torch.ones(2, 3000)
    assert torch.equal(empty(x), filled(x))
    with pytest.raises(RuntimeError, match="weight_scale"):
        QuantizedLinear("c", source).load_state_dict({**filled.state_dict(), "weight_scale": torch.ones(7)})


@pytest.mark.parametrize("width", [64, 1032, 1033, 3000, 8192])
@pytest.mark.parametrize("kind", ["largest", "random", "mixed signs"])
def test_sums_of_a_linear_are_exact(width: int, kind: str) -> None:
    """Held against int64, where float32 alone would have rounded: 127 * 128 * 1033 is beyond 2**24."""
    generator = torch.Generator().manual_seed(width)
    rows = {
        "largest": torch.full((6, width), -128),
        "random": torch.randint(-128, 128, (6, width), generator=generator),
        "mixed signs": torch.where(torch.rand(6, width, generator=generator) < 0.7, -128, 127),
    }[kind]
    x = torch.randint(-127, 128, (5, width), generator=generator)
    x[:, 0] = 127
    x[0] = 127
    if kind == "mixed signs":
        x[1] = torch.where(rows[0] < 0, 127, -126)
    linear = QuantizedLinear("linear", torch.nn.Linear(width, 6, bias=False))
    linear.fill(rows.to(torch.int8), torch.ones(6), torch.float32)
    wanted = (x.to(torch.int64) @ rows.to(torch.int64).t()).to(torch.float32)  # amax 127: the scale is 1
    assert torch.equal(linear(x.to(torch.float32)), wanted)
