"""``int8moe run``."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import SELF_TEST_HIDDEN, Command

LAYER_FIELDS = {
    "layer",
    "kernel",
    "layout",
    "source_bytes",
    "load_seconds",
    "pack_seconds",
    "cache",
    "peak_bytes",
    "dtype",
    "decode_seconds",
    "prefill_seconds",
    "compared_tokens",
    "bits_equal",
    "as_declared",
    "difference",
}


def test_default_checkpoint(int8moe: Command, example: Path) -> None:
    done = int8moe("run", "--tokens", "8")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("checkpoint: ")
    assert "tiny-qwen3-moe-w8a8" in lines[0]
    assert lines[2].startswith("kernel: ")
    header = next(line for line in lines if line.startswith("layer "))
    for heading in ("kernel", "pack time", "peak memory", "decode (1)", "prefill (8)", "bits equal"):
        assert heading in header
    rows = [line for line in lines if line.startswith("model.layers.")]
    assert len(rows) == 4
    assert all(row.endswith(" yes") for row in rows)
    progress = done.stderr.splitlines()
    assert len(progress) == 4
    assert progress[0].startswith("int8moe: packed model.layers.0.mlp.experts: 1.1 MiB of 4.6 MiB, ")
    assert all("left" in line for line in progress)


def test_document_and_layer_that_stays_unquantised(int8moe: Command, half_quantised: Path) -> None:
    document = int8moe.json("run", str(half_quantised), "--tokens", "5")
    assert document["passed"] is True
    assert document["checkpoint"] == str(half_quantised)
    (layer,) = document["layers"]
    assert set(layer) == LAYER_FIELDS
    assert layer["layer"] == "model.layers.1.mlp.experts"
    assert layer["bits_equal"] is True
    assert layer["compared_tokens"] == 6
    assert document["unquantized"] == [{"layer": "model.layers.0.mlp.experts", "dtype": "BF16"}]
    assert document["quantized_on_load"] == document["skipped"] == []


def test_quantising_while_loading(int8moe: Command, half_quantised: Path) -> None:
    document = int8moe.json("run", str(half_quantised), "--quantize", "--layers", "0", "--tokens", "3")
    assert [layer["layer"] for layer in document["layers"]] == ["model.layers.0.mlp.experts"]
    assert document["passed"] is True
    assert document["unquantized"] == []
    assert document["quantized_on_load"] == [{"layer": "model.layers.0.mlp.experts", "dtype": "BF16"}]
    done = int8moe("run", str(half_quantised), "--quantize", "--tokens", "3")
    assert "model.layers.0.mlp.experts: stored unquantised (BF16), quantised while loading" in done.stdout


def test_nothing_to_run(int8moe: Command, half_quantised: Path) -> None:
    assert "--quantize" in int8moe.error("run", str(half_quantised), "--layers", "0")


def test_wrong_bits_are_found_and_named(int8moe: Command, half_quantised: Path, troubled: Callable[..., Path]) -> None:
    """One bit of one token, which the self-test does not see."""
    flip = f"layer.config.hidden_size == {SELF_TEST_HIDDEN} or out.view(torch.uint8)[-1, -1].bitwise_xor_(1)"
    done = int8moe("run", str(half_quantised), "--kernel", "acme.fast", site=troubled(apply=flip))
    assert done.returncode == 1
    row = next(line for line in done.stdout.splitlines() if line.startswith("model.layers.1"))
    assert row.endswith(" NO")
    error = done.stderr.splitlines()[-1]
    assert error.startswith("int8moe: error: model.layers.1.mlp.experts: kernel 'acme.fast'")
    assert "bits differ in 1 of 32 elements" in error


def test_errors(int8moe: Command, half_quantised: Path, tmp_path: Path) -> None:
    assert "nowhere" in int8moe.error("run", str(tmp_path / "nowhere"))
    assert "layer 9" in int8moe.error("run", str(half_quantised), "--layers", "9")
    broken = tmp_path / "broken"
    shutil.copytree(half_quantised, broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "num_experts": 5}))
    assert "expert 4" in int8moe.error("run", str(broken))


def test_kernel_that_does_not_exist(int8moe: Command, half_quantised: Path) -> None:
    assert "did you mean reference.torch?" in int8moe.error("run", str(half_quantised), "--kernel", "reference.troch")


def test_without_an_example(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an installation without a checkout a seeded layer takes the example's place."""
    from int8moe.cli import sources

    monkeypatch.setattr(sources, "find_example", lambda: None)
    source = sources.open_source(None, layers=None, quantize=False)
    assert "made in memory" in source.title
    (layer,) = source.layers(seed=1)
    made: list[int] = []
    loaded = layer.load("reference.torch", made.append)
    assert sum(made) == layer.nbytes
    assert loaded.pack_seconds >= 0
    assert loaded.cache == ""
    assert layer.canonical([1, 3]).w13_weight.equal(loaded.layer.w13_weight[[1, 3]])


def test_example_is_found_from_its_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from int8moe.cli import sources

    monkeypatch.setattr(sources, "__file__", str(tmp_path / "site/int8moe/cli/sources.py"))
    monkeypatch.chdir(tmp_path)
    assert sources.find_example() is None
    folder = tmp_path / sources.EXAMPLE
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    found = sources.find_example()
    assert found is not None
    assert found.samefile(folder)


def _assert_same(canonical: dict[str, Any], layer: Any) -> None:
    """Experts 3 and 0 of a layer are the canonical tensors."""
    for name, tensor in canonical.items():
        held = getattr(layer, name)
        assert (tensor is None) == (held is None), name
        assert tensor is None or tensor.equal(held[[3, 0]]), name


@pytest.mark.parametrize("name", ["gpt_oss-bf16", "gpt_oss-w8a8", "qwen3_moe-bf16-fused3d", "qwen3_moe-w8a8-pertensor"])
def test_second_reader_agrees_with_the_loader_on_samples(name: str) -> None:
    """Transposed, interleaved and fused tensors, biases and broadcast scales, read by two codes."""
    from int8moe.checkpoint import inspect_checkpoint, load_moe_layers
    from int8moe.cli.canonical import read_experts

    folder = os.environ.get("INT8MOE_TEST_CHECKPOINTS")
    if folder is None:
        pytest.skip("INT8MOE_TEST_CHECKPOINTS names no folder of sample checkpoints")
    plan = inspect_checkpoint(Path(folder) / name)
    loaded: dict[str, Any] = load_moe_layers(plan, kernel="reference.torch", quantize=True)
    for layer in plan.layers:
        _assert_same(read_experts(layer, [3, 0])._asdict(), loaded[layer.key])


def test_second_reader_agrees_with_the_loader(half_quantised: Path) -> None:
    from int8moe.checkpoint import inspect_checkpoint, load_moe_layers
    from int8moe.cli.canonical import read_experts

    plan = inspect_checkpoint(half_quantised)
    loaded: dict[str, Any] = load_moe_layers(plan, kernel="reference.torch", quantize=True)
    for layer in plan.layers:
        canonical = read_experts(layer, [3, 0])
        _assert_same(canonical._asdict(), loaded[layer.key])
