"""Writes the same int8 experts in the other formats that are read, and in the layouts of fused experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from checkpoint_builder import EXPERTS, HIDDEN, LAYERS, TOP_K, WIDTH
from safetensors.torch import save_file
from torch import Tensor

Stored = dict[str, Tensor]

W8A8_INT8 = {"quant_method": "w8a8_int8"}

QUARK_WEIGHT = {"dtype": "int8", "qscheme": "per_channel", "ch_axis": 0, "is_dynamic": False, "symmetric": True}
QUARK_INPUT = {"dtype": "int8", "qscheme": "per_channel", "ch_axis": 1, "is_dynamic": True, "symmetric": True}


def quark(weight: dict[str, Any] | None = None, inputs: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """A quantization_config of quark: the supported one with changes."""
    spec = {
        "weight": {**QUARK_WEIGHT, **(weight or {})},
        "input_tensors": {**QUARK_INPUT, **(inputs or {})},
        "output_tensors": None,
        "bias": None,
    }
    return {
        "quant_method": "quark",
        "global_quant_config": spec,
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "exclude": ["lm_head", "*mlp.gate"],
        "export": {"weight_format": "real_quantized", "pack_method": "reorder"},
        **fields,
    }


def float_scales(stored: Stored, *, flat: bool = False) -> Stored:
    """Scales in fp32, ``[N]`` where flat."""
    return {
        name: (tensor.float().flatten() if flat else tensor.float()) if name.endswith("_scale") else tensor
        for name, tensor in stored.items()
    }


def with_zeros(stored: Stored, suffix: str, dtype: torch.dtype) -> Stored:
    """A tensor of zeros beside every scale."""
    zeros = {
        name.removesuffix("scale") + suffix: torch.zeros(tensor.shape, dtype=dtype)
        for name, tensor in stored.items()
        if name.endswith("_scale")
    }
    return {**stored, **zeros}


def description(stored: Stored, kind: str = "W8A8_DYNAMIC") -> dict[str, Any]:
    """What ModelSlim says of these tensors."""
    kinds = {name: kind if ".experts." in name else "FLOAT" for name in stored}
    return {"model_quant_type": kind, "version": "1.0.0", "group_size": 0, "metadata": {}, **kinds}


def write_modelslim(folder: Path, configuration: dict[str, Any], described: dict[str, Any], stored: Stored) -> Path:
    """Write a checkpoint under the file names of ModelSlim, in two shards."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(configuration))
    (folder / "quant_model_description.json").write_text(json.dumps(described))
    names = sorted(stored)
    weight_map = {}
    for i in range(2):
        file = f"quant_model_weights-{i + 1:05d}-of-00002.safetensors"
        part = {name: stored[name] for name in names[i::2]}
        save_file(part, str(folder / file))
        weight_map |= dict.fromkeys(part, file)
    (folder / "quant_model_weights.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def fuse(stored: Stored, *, transposed: bool = False, interleaved: bool = False, experts: int = EXPERTS) -> Stored:
    """The same experts as one 3-D tensor a projection, with scales and biases where there are any."""
    out = {name: tensor for name, tensor in stored.items() if ".experts." not in name}
    bases = dict.fromkeys(name.partition(".experts.")[0] + ".experts" for name in stored if ".experts." in name)
    for base in bases:
        for suffix, fused_suffix in (("weight", ""), ("weight_scale", "_scale"), ("bias", "_bias")):
            if f"{base}.0.gate_proj.{suffix}" not in stored:
                continue
            gate, up, down = (
                torch.stack([stored[f"{base}.{e}.{p}_proj.{suffix}"] for e in range(experts)])
                for p in ("gate", "up", "down")
            )
            gate_up = torch.stack([gate, up], dim=2).flatten(1, 2) if interleaved else torch.cat([gate, up], dim=1)
            for name, tensor in (("gate_up_proj", gate_up), ("down_proj", down)):
                turned = tensor.transpose(1, 2) if transposed and suffix != "bias" else tensor
                out[f"{base}.{name}{fused_suffix}"] = turned.contiguous()
    return out


def with_biases(stored: Stored) -> Stored:
    """Seeded biases for every projection."""
    generator = torch.Generator().manual_seed(11)
    biases = {
        name.removesuffix("weight") + "bias": torch.randn(tensor.shape[0], generator=generator).bfloat16()
        for name, tensor in sorted(stored.items())
        if ".experts." in name and name.endswith(".weight")
    }
    return {**stored, **biases}


_COMMON = {"hidden_size": HIDDEN, "hidden_act": "silu", "num_hidden_layers": LAYERS, "num_experts_per_tok": TOP_K}
_MOE = {"moe_intermediate_size": WIDTH, "intermediate_size": 3 * WIDTH}

MODELS: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"num_experts": EXPERTS, **_MOE},
    "qwen3_moe": {"num_experts": EXPERTS, **_MOE},
    "qwen3_next": {"num_experts": EXPERTS, **_MOE, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "mixtral": {"num_local_experts": EXPERTS, "intermediate_size": WIDTH},
    "olmoe": {"num_experts": EXPERTS, "intermediate_size": WIDTH},
    "deepseek_v2": {"n_routed_experts": EXPERTS, **_MOE, "first_k_dense_replace": 0, "topk_method": "greedy"},
    "deepseek_v3": {"n_routed_experts": EXPERTS, **_MOE, "first_k_dense_replace": 0, "n_group": 4, "topk_group": 2},
    "glm4_moe": {"n_routed_experts": EXPERTS, **_MOE, "first_k_dense_replace": 0},
    "gpt_oss": {"num_local_experts": EXPERTS, "intermediate_size": WIDTH, "swiglu_limit": 5.0},
}
"""model_type -> the fields of its config.json that say the sizes, as transformers writes them."""


def model_config(model_type: str, quant: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """A config.json of one of MODELS."""
    more = {} if quant is None else {"quantization_config": quant}
    return {"model_type": model_type, **_COMMON, **MODELS[model_type], **more, **fields}
