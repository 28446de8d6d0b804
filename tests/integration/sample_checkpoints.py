"""Where the sample checkpoints lie."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tiny-qwen3-moe-w8a8"


def sample(name: str) -> Path:
    """A sample checkpoint; the trained one is part of this repository."""
    if name == "trained-qwen3moe-w8a8":
        return EXAMPLE
    folder = os.environ.get("INT8MOE_TEST_CHECKPOINTS")
    if folder is None or not (Path(folder) / name).is_dir():
        pytest.skip(f"INT8MOE_TEST_CHECKPOINTS names no folder with {name}")
    return Path(folder) / name
