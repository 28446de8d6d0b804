"""A tiny checkpoint in two shards, and the folder of its packed cache."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoint_builder import config, quantization, tensors, write


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write(tmp_path / "model", config(quant=quantization()), tensors(), shards=2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"
