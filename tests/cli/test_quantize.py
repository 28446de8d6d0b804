"""``int8moe quantize``."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import Command


@pytest.fixture(scope="session")
def unquantised(tmp_path_factory: pytest.TempPathFactory, half_quantised: Path) -> Path:
    """Layer 0 of the half-quantised checkpoint as a model of its own."""
    import json

    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("unquantised")
    config = json.loads((half_quantised / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    stored = load_file(str(half_quantised / "model.safetensors"))
    save_file({name: stored[name] for name in stored if ".layers.0." in name}, str(folder / "model.safetensors"))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_what_it_writes_runs(int8moe: Command, unquantised: Path, tmp_path: Path) -> None:
    done = int8moe("quantize", str(unquantised), str(tmp_path / "w8a8"))
    assert done.returncode == 0, done.stderr
    assert "experts:     4 in 1 layers, quantised" in done.stdout
    assert "copied: tokenizer.json" in done.stdout
    assert done.stderr.splitlines()[-1].startswith("int8moe: quantised model.safetensors: ")
    document = int8moe.json("run", str(tmp_path / "w8a8"), "--tokens", "3")
    assert document["passed"] is True
    assert {path.name for path in tmp_path.iterdir()} == {"w8a8"}


def test_document(int8moe: Command, unquantised: Path, tmp_path: Path) -> None:
    document = int8moe.json("quantize", str(unquantised), str(tmp_path / "w8a8"))
    assert document["layers"] == ["model.layers.0.mlp.experts"]
    assert document["shards"] == ["model.safetensors"]
    assert document["resumed"] == []
    assert document["nbytes"] == (tmp_path / "w8a8" / "model.safetensors").stat().st_size


def test_errors(int8moe: Command, unquantised: Path, half_quantised: Path, without_torch: Path, tmp_path: Path) -> None:
    def error(*arguments: str) -> str:
        return int8moe.error("quantize", *arguments, site=without_torch)

    assert "exists already" in error(str(unquantised), str(tmp_path))
    assert "exists already" in error(str(tmp_path / "absent"), str(tmp_path))
    assert "names no new directory" in error(str(unquantised), ".")
    assert "is quantised already" in error(str(half_quantised), str(tmp_path / "w8a8"))
    assert "Missing argument 'DST'" in int8moe.error("quantize", str(unquantised), status=2)
    assert not list(tmp_path.iterdir())
