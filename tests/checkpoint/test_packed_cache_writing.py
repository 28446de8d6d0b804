"""What of a packed cache cannot be written is reported; nothing is half written, and processes do not collide."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cached_layers import assert_same, files, load, touch

import int8moe
from int8moe.checkpoint import packed_cache, safetensors_file

COMMAND = [sys.executable, "-c", "from int8moe.cli import main; main()"]


def test_a_folder_that_cannot_be_written_to(checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with caplog.at_level(logging.WARNING, "int8moe.checkpoint"):
        layers, states = load(checkpoint, blocked / "cache")
    assert states == ["failed", "failed"]
    assert "cannot be written (going on without)" in caplog.records[0].getMessage()
    assert_same(layers, int8moe.load_moe_layers(checkpoint))
    with pytest.raises(int8moe.CheckpointError, match="cannot be written: .*INT8MOE_CACHE_DIR or --cache-dir"):
        load(checkpoint, blocked / "cache", required=True)


def test_a_full_disk_leaves_nothing_behind(
    checkpoint: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    load(checkpoint, folder)
    before = {file: file.read_bytes() for file in files(folder)}
    touch(checkpoint)

    def full(descriptor: int) -> None:
        assert any(file.name.endswith(safetensors_file.PARTIAL) for file in files(folder))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(safetensors_file.os, "fsync", full)
    with caplog.at_level(logging.WARNING, "int8moe.checkpoint"):
        layers, states = load(checkpoint, folder)
    assert states == ["failed", "failed"]
    assert "No space left on device" in caplog.text
    assert {file: file.read_bytes() for file in files(folder)} == before
    assert_same(layers, int8moe.load_moe_layers(checkpoint))


def test_what_a_killed_writer_left_is_removed_later(checkpoint: Path, folder: Path) -> None:
    load(checkpoint, folder)
    (first, _) = files(folder)
    old = first.with_name(f".{first.name}.0{safetensors_file.PARTIAL}")
    recent = first.with_name(f".{first.name}.1{safetensors_file.PARTIAL}")
    for partial in (old, recent):
        partial.write_bytes(b"half")
    os.utime(old, (1, 1))
    touch(checkpoint)
    load(checkpoint, folder)
    assert not old.exists()
    assert recent.exists()  # somebody may be writing it


def test_two_processes_at_once_do_not_collide(checkpoint: Path, folder: Path) -> None:
    pack = [*COMMAND, "pack", str(checkpoint), "--cache-dir", str(folder), "--json"]
    running = [
        subprocess.Popen(pack, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL)
        for _ in range(2)
    ]
    for process in running:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert len(json.loads(out)["layers"]) == 2
    assert len(files(folder)) == 2
    layers, states = load(checkpoint, folder)
    assert states == ["read", "read"]
    assert_same(layers, int8moe.load_moe_layers(checkpoint))


def test_another_checkpoint_of_the_same_name_has_files_of_its_own(
    checkpoint: Path, folder: Path, tmp_path: Path
) -> None:
    load(checkpoint, folder)
    other = tmp_path / "elsewhere" / checkpoint.name
    shutil.copytree(checkpoint, other)
    assert load(other, folder)[1] == ["written", "written"]
    assert load(checkpoint, folder)[1] == ["read", "read"]


def test_the_folder_is_the_users_or_the_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("INT8MOE_CACHE_DIR", str(tmp_path / "named"))
    assert packed_cache.default_cache_directory() == tmp_path / "named"
    monkeypatch.delenv("INT8MOE_CACHE_DIR")
    assert packed_cache.default_cache_directory().name == "int8moe"
