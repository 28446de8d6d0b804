"""``int8moe pack``, and ``int8moe run`` on what it wrote."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from .conftest import Command

LAYER_FIELDS = {"layer", "kernel", "layout", "state", "file", "nbytes"}
KEY = "model.layers.1.mlp.experts"


@pytest.fixture
def checkpoint(half_quantised: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(half_quantised, tmp_path / "model"))


def test_run_reads_what_pack_wrote(int8moe: Command, checkpoint: Path, tmp_path: Path) -> None:
    folder = str(tmp_path / "cache")
    run = ("run", str(checkpoint), "--tokens", "3")
    (layer,) = int8moe.json(*run, INT8MOE_CACHE_DIR=folder)["layers"]
    assert layer["cache"] == "absent"
    assert not (tmp_path / "cache").exists()  # only pack begins a cache

    document = int8moe.json("pack", str(checkpoint), "--cache-dir", folder)
    (packed,) = document["layers"]
    assert set(packed) == LAYER_FIELDS
    assert (packed["layer"], packed["state"]) == (KEY, "written")
    assert Path(packed["file"]).stat().st_size == packed["nbytes"]
    assert document["unquantized"] == [{"layer": "model.layers.0.mlp.experts", "dtype": "BF16"}]
    (again,) = int8moe.json("pack", str(checkpoint), INT8MOE_CACHE_DIR=folder)["layers"]
    assert again == {**packed, "state": "up to date"}

    for option in ((), ("--mmap",)):
        (layer,) = int8moe.json(*run, *option, "--cache-dir", folder)["layers"]
        assert (layer["cache"], layer["pack_seconds"], layer["bits_equal"]) == ("read", 0, True)
    (layer,) = int8moe.json(*run, "--no-cache", INT8MOE_CACHE_DIR=folder)["layers"]
    assert layer["cache"] == ""


def test_a_cache_that_no_longer_fits_is_one_line_and_written_again(
    int8moe: Command, checkpoint: Path, tmp_path: Path
) -> None:
    folder = str(tmp_path / "cache")
    (packed,) = int8moe.json("pack", str(checkpoint), "--cache-dir", folder)["layers"]
    os.truncate(packed["file"], 5000)
    run = ("run", str(checkpoint), "--tokens", "3", "--json", "--cache-dir", folder)
    for told in ("is damaged: it has 5000 bytes", "is stale: model.safetensors of the checkpoint changed since"):
        done = int8moe(*run)
        assert done.returncode == 0
        (warning,) = (line for line in done.stderr.splitlines() if "packed cache" in line)
        assert warning.startswith(f"int8moe: warning: packed cache {packed['file']} {told}")
        assert json.loads(done.stdout)["layers"][0]["cache"] == "written"
        os.utime(checkpoint / "model.safetensors", (1, 1))


def test_table(int8moe: Command, checkpoint: Path, tmp_path: Path) -> None:
    done = int8moe("pack", str(checkpoint), "--quantize", "--cache-dir", str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("model.layers.")]
    assert len(rows) == 2
    assert all(row.endswith("written") for row in rows)
    assert "2 of 2 layers written" in done.stdout


def test_errors(int8moe: Command, checkpoint: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    done = int8moe("pack", str(checkpoint), "--cache-dir", str(blocked / "cache"))
    assert done.returncode == 1
    (line,) = (line for line in done.stderr.splitlines() if "error" in line)
    assert "cannot be written" in line
    assert "--cache-dir" in line
    assert "no such directory" in int8moe.error("pack", str(tmp_path / "absent"))
    assert "--no-cache excludes" in int8moe.error("run", str(checkpoint), "--no-cache", "--mmap", status=2)


def test_a_folder_that_cannot_be_written_to_is_refused_first(
    int8moe: Command, checkpoint: Path, without_torch: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    pack = ("pack", str(checkpoint))
    line = int8moe.error(*pack, "--cache-dir", str(tmp_path / "file" / "cache"), site=without_torch)
    assert line.startswith(f"packed cache {tmp_path / 'file' / 'cache'} cannot be written: ")
    assert "name another folder with INT8MOE_CACHE_DIR or --cache-dir" in line
    assert "cannot be written" in int8moe.error(*pack, site=without_torch, INT8MOE_CACHE_DIR=str(tmp_path / "file"))


def test_what_comes_from_the_cache_is_not_said_to_be_packed(int8moe: Command, checkpoint: Path, tmp_path: Path) -> None:
    arguments = (str(checkpoint), "--cache-dir", str(tmp_path / "cache"))
    first = int8moe("pack", *arguments).stderr
    assert f"packed {KEY}: " in first
    for verb in (("run", "--tokens", "2"), ("pack",)):
        said = int8moe(*verb, *arguments).stderr
        assert f"from the cache: {KEY}: " in said
        assert "packed" not in said
