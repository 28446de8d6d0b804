"""Every stored expert tensor has exactly one use; whatever is missing, surplus or off is told at once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_builder import KEY, LAYERS, SPELLINGS, config, group, quantization, tensors, write
from format_builder import fuse
from torch import Tensor

import int8moe
from int8moe.checkpoint import inspect_checkpoint, load_moe_layers
from int8moe.checkpoint import load as load_module
from int8moe.errors import CheckpointError

Stored = dict[str, Tensor]


def name(expert: int, rest: str, layer: int = 0) -> str:
    return f"{KEY.format(layer)}.{expert}.{rest}"


def without(*names: str) -> Callable[[Stored], Stored]:
    return lambda stored: {k: v for k, v in stored.items() if k not in names}


def having(**changed: Tensor) -> Callable[[Stored], Stored]:
    return lambda stored: {**stored, **changed}


def put(key: str, value: Tensor) -> Callable[[Stored], Stored]:
    return lambda stored: {**stored, key: value}


def cast(key: str, dtype: torch.dtype) -> Callable[[Stored], Stored]:
    return lambda stored: {**stored, key: stored[key].to(dtype)}


def damaged_scale(key: str, value: float) -> Callable[[Stored], Stored]:
    def change(stored: Stored) -> Stored:
        scale = stored[key].clone()
        scale[3] = value
        return {**stored, key: scale}

    return change


SCALE = torch.ones(16, 1, dtype=torch.bfloat16)

STRUCTURE = {
    "missing scale": (without(name(5, "up_proj.weight_scale")), ["expert 5 lacks up_proj.weight_scale in model.safe"]),
    "missing scales": (
        without(*(name(e, "up_proj.weight_scale") for e in (1, 2, 3, 7))),
        ["experts 1-3, 7 lack up_proj.weight_scale"],
    ),
    "missing weight": (without(name(0, "down_proj.weight")), ["expert 0 lacks down_proj.weight"]),
    "missing expert": (
        lambda s: {k: v for k, v in s.items() if not k.startswith(f"{KEY.format(1)}.6.")},
        ["model.layers.1.mlp.experts: expert 6 is absent", "num_experts is 8"],
    ),
    "missing layer": (
        lambda s: {k: v for k, v in s.items() if not k.startswith(KEY.format(1))},
        ["model.layers.1.mlp.experts: no expert of this layer is stored"],
    ),
    "no weights at all": (
        lambda s: {k: v for k, v in s.items() if not k.endswith("proj.weight")},
        ["model.layers.0.mlp.experts: no expert has a weight (found weight_scale)"],
    ),
    "surplus expert": (
        lambda s: {**s, **{name(8, f"{p}_proj.{x}"): s[name(0, f"{p}_proj.{x}")].clone()
                           for p in ("gate", "up", "down") for x in ("weight", "weight_scale")}},
        ["would be left over", "expert 8 (num_experts is 8)"],
    ),
    "static scale": (
        put(name(2, "up_proj.input_scale"), torch.ones(1)),
        ["input_scale of expert 2", "static activation scales"],
    ),
    "unknown suffix": (put(name(2, "up_proj.weight_g_idx"), torch.ones(1)), ["weight_g_idx of expert 2"]),
    "scale kind not in the table": (
        lambda s: {**s, **{k + "_inv": v.clone() for k, v in s.items() if k.endswith("_scale")}},
        ["weight_scale_inv of experts 0-7"],
    ),
    "unknown projection": (put(name(2, "mid_proj.weight"), torch.ones(1)), [name(2, "mid_proj.weight")]),
    "fused beside single": (
        put(f"{KEY.format(0)}.gate_up_proj", torch.ones(8, 32, 32)),
        ["such as model.layers.0.mlp.experts.gate_up_proj"],
    ),
    "other expert tensors": (
        put("model.experts.foo", torch.ones(1)),
        ["1 tensor outside the layers, such as model.experts.foo"],
    ),
    "weight shape": (
        put(name(4, "gate_proj.weight"), torch.zeros(16, 31, dtype=torch.int8)),
        ["[16, 31], not [16, 32], for gate_proj.weight of expert 4", "hidden_size 32"],
    ),
    "transposed": (
        put(name(4, "down_proj.weight"), torch.zeros(16, 32, dtype=torch.int8)),
        ["[16, 32], not [32, 16], for down_proj.weight of expert 4"],
    ),
    "group scale": (
        put(name(4, "gate_proj.weight_scale"), torch.ones(16, 2)),
        ["[16, 2], not [16, 1] or [16] (strategy channel), for gate_proj.weight_scale of expert 4"],
    ),
    "one scale where channels are declared": (
        put(name(4, "gate_proj.weight_scale"), torch.ones(1)),
        ["[1], not [16, 1] or [16] (strategy channel)"],
    ),
    "float8 weight": (cast(name(3, "up_proj.weight"), torch.float8_e4m3fn), ["F8_E4M3 in up_proj of expert 3"]),
    "uint8 weight": (cast(name(3, "up_proj.weight"), torch.uint8), ["U8 in up_proj of expert 3"]),
    "bf16 weight among int8": (
        cast(name(3, "up_proj.weight"), torch.bfloat16),
        ["quantised in part", "BF16 in up_proj of expert 3"],
    ),
    "float64 scale": (
        cast(name(3, "up_proj.weight_scale"), torch.float64),
        ["F64 for up_proj.weight_scale of expert 3"],
    ),
}  # fmt: skip

VALUES = {
    "nan": (damaged_scale(name(5, "up_proj.weight_scale"), float("nan")), "experts.5.up_proj.weight_scale (expert 5"),
    "inf": (damaged_scale(name(5, "gate_proj.weight_scale"), float("inf")), "holds inf in 1 of 16 places"),
    "negative": (
        damaged_scale(name(7, "down_proj.weight_scale", 1), -1.0),
        "model.layers.1.mlp.experts.7.down_proj.weight_scale (expert 7, in model.safetensors) holds -1 in 1 of 32",
    ),
    "zero point": (
        put(name(1, "up_proj.weight_zero_point"), torch.eye(16, 1, dtype=torch.int8)),
        "up_proj.weight_zero_point (expert 1) is not all zero",
    ),
}  # fmt: skip


def refusal(folder: Path, *, inspect: bool = True) -> str:
    with pytest.raises(CheckpointError) as caught:
        inspect_checkpoint(folder) if inspect else load_moe_layers(folder)
    text = str(caught.value)
    assert "\n" not in text
    assert str(folder) in text
    return text


@pytest.mark.parametrize("fault", STRUCTURE)
def test_structure_is_checked_from_headers_alone(tmp_path: Path, fault: str) -> None:
    change, found = STRUCTURE[fault]
    text = refusal(write(tmp_path, config(quant=quantization()), change(tensors())))
    for part in found:
        assert part in text


@pytest.mark.parametrize("fault", VALUES)
def test_values_are_checked_before_any_kernel_is_chosen(
    tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, found = VALUES[fault]
    monkeypatch.setattr(load_module, "FusedMoE", lambda *_, **__: pytest.fail("a layer was made"))
    assert found in refusal(write(tmp_path, config(quant=quantization()), change(tensors())), inspect=False)


def test_all_faults_are_told_at_once_and_capped(tmp_path: Path) -> None:
    stored = tensors()
    for expert in range(8):
        for layer in range(2):
            stored[name(expert, "up_proj.weight_scale", layer)][0] = -1
    text = refusal(write(tmp_path, config(quant=quantization()), stored), inspect=False)
    assert text.count("holds -1") == 8
    assert "and 8 more" in text
    stored = without(name(1, "up_proj.weight"), name(2, "gate_proj.weight_scale", 1))(tensors())
    stored[name(0, "up_proj.input_scale")] = torch.ones(1)
    text = refusal(write(tmp_path, config(quant=quantization()), stored))
    assert "expert 1 lacks up_proj.weight in" in text
    assert "model.layers.1.mlp.experts: expert 2 lacks gate_proj.weight_scale" in text
    assert "input_scale of expert 0" in text


def test_a_config_of_another_size_is_one_fault_a_tensor_kind(tmp_path: Path) -> None:
    text = refusal(write(tmp_path, config(quant=quantization(), moe_intermediate_size=24), tensors()))
    assert "[16, 32], not [24, 32], for gate_proj.weight of experts 0-7" in text
    text = refusal(write(tmp_path, config(quant=quantization(), num_experts=9), tensors()))
    assert "expert 8 is absent" in text
    text = refusal(write(tmp_path, config(quant=quantization(), num_experts=6), tensors()))
    assert "experts 6-7 (num_experts is 6)" in text


def test_a_mixtral_expert_in_both_spellings_says_the_same_twice(tmp_path: Path) -> None:
    stored = tensors("mixtral")
    base = SPELLINGS["mixtral"][0].format(layer=0)
    stored[f"{base}.2.w1.weight"] = stored[f"{base}.2.gate_proj.weight"].clone()
    text = refusal(write(tmp_path, config("mixtral", quantization()), stored))
    assert f"{base}.2.w1.weight says the same as" in text or "gate_proj.weight says the same as" in text


def test_scales_beside_float_weights_are_left_over(tmp_path: Path) -> None:
    """What llm-compressor writes with save_compressed=False, and repack_moe: looks quantised, is not."""
    stored = tensors(quantized=False)
    scales = {k: v for k, v in tensors().items() if k.endswith("weight_scale")}
    text = refusal(write(tmp_path / "a", config(quant=quantization()), {**stored, **scales}))
    assert "scales beside weights that are not quantised" in text
    repacked = {**stored, f"{KEY.format(0)}.gate_up_proj_scale": torch.ones(8, 16, 2)}
    assert "gate_up_proj_scale" in refusal(write(tmp_path / "b", config(quant=quantization()), repacked))


def test_floats_without_scales_that_the_config_quantises(tmp_path: Path) -> None:
    """Such a checkpoint was never quantised; what to do about it depends on its owner."""
    stored = tensors(quantized=False)
    text = refusal(write(tmp_path / "all", config(quant=quantization()), stored))
    assert "floats where quantization_config says int8: model.layers.0.mlp.experts: BF16 in " in text
    assert "(config group group_0)" in text
    assert "take quantization_config out of config.json, or put these experts on its ignore list" in text
    some = quantization(group(targets=[r"re:.*layers\.1\..*experts\.3\.up_proj"]))
    assert "model.layers.1.mlp.experts: BF16 in up_proj of expert 3 (" in refusal(
        write(tmp_path / "some", config(quant=some), stored)
    )
    # Left alone by the ignore list, by the targets, or by the absence of a config: they are floats, and may be so.
    alone = [
        config(quant=quantization(ignore=["re:.*experts.*"])),
        config(quant=quantization(group(targets=["re:.*self_attn.*"]))),
        config(),
    ]
    for index, configuration in enumerate(alone):
        folder = write(tmp_path / str(index), configuration, stored)
        assert not load_moe_layers(folder)
        assert len(load_moe_layers(folder, quantize=True)) == LAYERS
    # A tensor of all experts is no Linear, so that `targets: [Linear]` does not mean it; a pattern may.
    fused = fuse(stored)
    assert not load_moe_layers(write(tmp_path / "fused", config(quant=quantization()), fused))
    meant = quantization(group(targets=["re:.*experts.*"]))
    assert "says int8" in refusal(write(tmp_path / "meant", config(quant=meant), fused))


def test_zero_points_of_zero_are_consumed(tmp_path: Path) -> None:
    stored = tensors()
    for key in [k for k in stored if k.endswith("weight_scale")]:
        stored[key.replace("scale", "zero_point")] = torch.zeros(stored[key].shape, dtype=torch.int8)
    assert len(load_moe_layers(write(tmp_path, config(quant=quantization()), stored))) == 2


def test_layers_past_the_model_are_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write(tmp_path, config(quant=quantization()), tensors(layers=3))
    with caplog.at_level("INFO", "int8moe.checkpoint"):
        assert list(load_moe_layers(folder)) == [KEY.format(0), KEY.format(1)]
    (skipped,) = inspect_checkpoint(folder).skipped
    assert (skipped.name, skipped.index, skipped.num_tensors) == ("model.layers.2", 2, 48)
    assert "outside the model's 2 layers, and skipped: model.layers.2" in caplog.text


def test_shared_experts_are_not_routed_experts(tmp_path: Path) -> None:
    stored = tensors("qwen2_moe")
    for projection in ("gate", "up", "down"):
        stored[f"model.layers.0.mlp.shared_expert.{projection}_proj.weight"] = torch.zeros(3, 3, dtype=torch.int8)
    stored["model.layers.0.mlp.shared_expert_gate.weight"] = torch.zeros(1, 32)
    assert len(load_moe_layers(write(tmp_path, config("qwen2_moe", quantization()), stored))) == 2


def test_a_nan_in_float_weights_is_named(tmp_path: Path) -> None:
    stored = tensors(quantized=False)
    stored[name(6, "down_proj.weight", 1)][9, 2] = float("nan")
    folder = write(tmp_path, config(), stored)
    with pytest.raises(CheckpointError, match=r"layers\.1.*experts\.6\.down_proj\.weight \(expert 6\).* row 9"):
        load_moe_layers(folder, quantize=True)


@pytest.mark.parametrize("failing", ["bad value", "interrupt"])
def test_after_a_failure_no_layer_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    made: list[weakref.ref[int8moe.FusedMoE]] = []

    class Recorded(int8moe.FusedMoE):
        def __init__(self, *args: object, **keywords: object) -> None:
            super().__init__(*args, **keywords)  # type: ignore[arg-type]
            made.append(weakref.ref(self))

    def interrupt(key: str, done: int, total: int) -> None:
        if failing == "interrupt" and done == total:
            raise KeyboardInterrupt

    monkeypatch.setattr(load_module, "FusedMoE", Recorded)
    stored = tensors(quantized=False)
    if failing == "bad value":
        stored[name(6, "down_proj.weight", 1)][9, 2] = float("nan")
    folder = write(tmp_path, config(), stored)
    with pytest.raises((CheckpointError, KeyboardInterrupt)) as caught:
        load_moe_layers(folder, quantize=True, progress=interrupt)
    gc.collect()
    assert len(made) == 2
    assert [reference() for reference in made] == [None, None]
    assert caught.value.__traceback__ is not None  # it is kept, and holds nothing


def test_per_tensor_scales_have_to_be_declared(tmp_path: Path) -> None:
    quant = quantization(group({"strategy": "tensor"}))
    text = refusal(write(tmp_path, config(quant=quant), tensors()))
    assert "[16, 1], not [1, 1] or [1] or [] (strategy tensor), for gate_proj.weight_scale of experts 0-7" in text
