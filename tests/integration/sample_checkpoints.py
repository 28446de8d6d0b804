"""The sample checkpoints, changed copies of them, and models that transformers loads of them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tiny-qwen3-moe-w8a8"


def sample(name: str) -> Path:
    """A sample checkpoint; the trained one is part of this repository."""
    if name == "trained-qwen3moe-w8a8":
        return EXAMPLE
    folder = os.environ.get("INT8MOE_TEST_CHECKPOINTS")
    if folder is None or not (Path(folder) / name).is_dir():
        pytest.skip(f"INT8MOE_TEST_CHECKPOINTS names no folder with {name}")
    return Path(folder) / name


def load(folder: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **({"dtype": torch.float32} | options))


def logits_of(model: Any, input_ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids).logits
    return logits


def changed_copy(name: str, folder: Path, **changes: torch.Tensor | None) -> Path:
    """A copy of a sample with tensors replaced, added, or (None) left out."""
    shutil.copytree(sample(name), folder)
    tensors = load_file(str(folder / "model.safetensors"))
    for key, tensor in changes.items():
        if tensor is None:
            del tensors[key]
        else:
            tensors[key] = tensor
    save_file(tensors, str(folder / "model.safetensors"), {"format": "pt"})
    return folder


def change_config(folder: Path, **fields: Any) -> dict[str, Any]:
    """Replace fields of config.json; None takes one out. Returns the whole."""
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **fields}
    config = {name: value for name, value in config.items() if value is not None}
    file.write_text(json.dumps(config))
    return config
