"""``int8moe explain``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .conftest import Command

CONFIG = {"num_experts": 8, "top_k": 2, "hidden_size": 64, "intermediate_size": 32}


def test_every_candidate_has_its_reason(int8moe: Command, plugins: Any) -> None:
    plugins.add_good("acme")
    plugins.add_good("zvx", isa='(("zvx9",),)')
    done = int8moe("explain", "--config", json.dumps(CONFIG), site=plugins.folder, INT8MOE_PLUGINS="acme,zvx")
    assert done.returncode == 0
    rows = {line.split()[0]: line for line in done.stdout.splitlines() if line}
    assert " chosen " in rows["acme.fast"]
    assert " outranked " in rows["reference.torch"]
    assert " rejected " in rows["zvx.fast"]
    assert "zvx9" in rows["zvx.fast"]
    assert "zvx-kernels" in rows["zvx.fast"]


def test_no_kernel(int8moe: Command) -> None:
    config = json.dumps({**CONFIG, "hidden_size": 70_000})
    document = int8moe.json("explain", "--config", config, status=1)
    assert document["chosen"] is None
    reasons = {row["name"]: row["reason"] for row in document["rejected"]}
    assert "65,793" in reasons["reference.torch"]
    assert "65,793" in document["error"]

    done = int8moe("explain", "--config", config)
    assert done.returncode == 1
    assert "65,793" in done.stdout
    assert len(done.stderr.splitlines()) == 1


def test_unknown_kernel_has_near_names(int8moe: Command) -> None:
    document = int8moe.json("explain", "--config", json.dumps(CONFIG), "--kernel", "reference.troch", status=1)
    assert document["chosen"] is None
    assert "reference.torch" in document["error"]


def test_bad_configs(int8moe: Command, tmp_path: Path) -> None:
    assert "hiden_size" in int8moe.error("explain", "--config", json.dumps({**CONFIG, "hiden_size": 3}))
    file = tmp_path / "bad.json"
    file.write_text("{")
    assert f"{file}: is not JSON" in int8moe.error("explain", "--config", f"@{file}")
    file.write_text("[]")
    assert "list" in int8moe.error("explain", "--config", f"@{file}")


def test_checkpoint(int8moe: Command, half_quantised: Path) -> None:
    document = int8moe.json("explain", "--checkpoint", str(half_quantised), "--kernel", "reference.torch")
    assert document["schema"] == 1
    assert document["pinned"] == "kernel="
    assert document["config"]["num_experts"] == 4
    assert document["layers"] == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    assert document["chosen"] == "reference.torch"
    assert document["other_configs"] == []


def test_no_checkpoint(int8moe: Command, tmp_path: Path) -> None:
    assert "nothing-here" in int8moe.error("explain", "--checkpoint", str(tmp_path / "nothing-here"))


def test_layers_outside_the_model_are_named(int8moe: Command, half_quantised: Path, tmp_path: Path) -> None:
    """The same checkpoint with one layer fewer in config.json: the other is a prediction head's."""
    for file in half_quantised.iterdir():
        (tmp_path / file.name).symlink_to(file)
    fields = json.loads((half_quantised / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({**fields, "num_hidden_layers": 1}))
    document = int8moe.json("explain", "--checkpoint", str(tmp_path), "--kernel", "reference.torch")
    assert document["skipped"] == ["model.layers.1"]
    assert document["unquantized"] == ["model.layers.0.mlp.experts"]
    done = int8moe("run", str(tmp_path), "--quantize", "--tokens", "2")
    assert (
        "model.layers.1: outside the model's layers (multi-token prediction), skipped (24 expert tensors" in done.stdout
    )
