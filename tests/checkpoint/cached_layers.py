"""Loads layers through a packed cache, and holds them against others."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

import int8moe
from int8moe.checkpoint import PackedCache
from int8moe.checkpoint.checked_files import NOTES


def load(checkpoint: Path, folder: Path, *, kernel: str | None = None, **options: Any) -> tuple[Any, list[str]]:
    """The layers, and what the cache did for each."""
    cache = PackedCache(folder, **options)
    layers = int8moe.load_moe_layers(checkpoint, kernel=kernel, cache=cache)
    return layers, [cache.outcomes[key].state for key in layers]


def files(folder: Path) -> list[Path]:
    """Every file but the notes of what was digested."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != NOTES)


def assert_same(found: dict[str, int8moe.FusedMoE], wanted: dict[str, int8moe.FusedMoE]) -> None:
    assert list(found) == list(wanted)
    for key, layer in found.items():
        state, other = layer.state_dict(), wanted[key].state_dict()
        assert list(state) == list(other)
        for name, tensor in state.items():
            if name != "_extra_state":
                assert torch.equal(tensor, other[name])
        assert layer.weight_layout == wanted[key].weight_layout
        config = layer.config
        x = torch.randn(3, config.hidden_size)
        weights, ids = torch.rand(3, config.top_k), torch.randint(0, config.num_experts, (3, config.top_k))
        assert torch.equal(layer(x, weights, ids), wanted[key](x, weights, ids))


def touch(checkpoint: Path) -> None:
    """New times of change for the weights."""
    os.utime(checkpoint / "model-00001-of-00002.safetensors", (1, 1))
