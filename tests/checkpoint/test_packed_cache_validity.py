"""What of a packed cache no longer fits is reported in one line, and written again."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cached_layers import assert_same, files, load, touch
from checkpoint_builder import config, quantization, tensors, write

import int8moe
from int8moe.checkpoint import packed_file


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 100)


def cut_in_header(file: Path) -> None:
    os.truncate(file, 100)


def empty(file: Path) -> None:
    os.truncate(file, 0)


def lengthen(file: Path) -> None:
    with file.open("ab") as stream:
        stream.write(b"more")


def flip(offset: int) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        data = bytearray(file.read_bytes())
        data[offset] ^= 1
        file.write_bytes(data)

    return change


def rewrite(**changed: Any) -> Callable[[Path], None]:
    """Another identity in an otherwise sound file."""

    def change(file: Path) -> None:
        with packed_file.PackedFile(file) as packed:
            stored = {name: torch.empty_like(tensor, device="cpu") for name, tensor in packed.meta_tensors().items()}
            for name, tensor in stored.items():
                packed.read_into(name, tensor)
            identity, extra = {**packed.identity, **changed}, packed.extra_state
        packed_file.write_packed(file, stored, identity, extra)

    return change


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (truncate, "is damaged: it has"),
    "cut in its header": (cut_in_header, "is damaged: it is truncated"),
    "empty": (empty, "is damaged: it is truncated"),
    "longer": (lengthen, "is damaged: it has"),
    "header length flipped": (flip(7), "is damaged: it is truncated"),
    "header flipped": (flip(40), "is damaged: it has a header that"),
    "first weight flipped": (flip(4096), "is damaged: it holds other bytes than were written, in w13_weight"),
    "last byte flipped": (flip(-1), "is damaged: it holds other bytes than were written"),
    "another layout": (rewrite(layout="other:layout:1:1"), "is foreign: packed as other:layout:1:1, and this kernel"),
    "other numerics": (rewrite(layout="int8moe:canonical:1:99"), "is foreign: packed as int8moe:canonical:1:99"),
    "another layer": (rewrite(key="model.layers.7.mlp.experts"), "is foreign: made for another layer"),
    "another reader": (rewrite(reader=0), "is stale: made by another version of int8moe"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_reported_in_one_line_and_mended(
    checkpoint: Path, folder: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    damage, told = DAMAGE[kind]
    cold, _ = load(checkpoint, folder, kernel="reference.torch")
    sound = [file.read_bytes() for file in files(folder)]
    damage(files(folder)[0])
    with caplog.at_level(logging.WARNING, "int8moe.checkpoint"):
        again, states = load(checkpoint, folder, kernel="reference.torch", create=False)
    assert states == ["written", "read"]
    (record,) = caplog.records
    assert told in record.getMessage()
    assert str(files(folder)[0]) in record.getMessage()
    assert "\n" not in record.getMessage()
    assert_same(again, cold)
    assert [file.read_bytes() for file in files(folder)] == sound


def rewrite_weights(checkpoint: Path) -> None:
    stored = {
        name: torch.randint_like(tensor, -5, 5) if tensor.dtype == torch.int8 else tensor
        for name, tensor in tensors().items()
    }
    write(checkpoint, config(quant=quantization()), stored, shards=2)


def same_size_and_time(change: Callable[[Path], None]) -> Callable[[Path], None]:
    """Other weights in files whose sizes, mtimes and headers stay as they were."""

    def changed(checkpoint: Path) -> None:
        before = {file: file.stat() for file in checkpoint.glob("*.safetensors")}
        change(checkpoint)
        for file, status in before.items():
            os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
            assert (file.stat().st_size, file.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)

    return changed


def flip_in_place(checkpoint: Path) -> None:
    for file in checkpoint.glob("*.safetensors"):
        with file.open("r+b") as stream:
            data = 8 + int.from_bytes(stream.read(8), "little")
            stream.seek(data)
            (first,) = stream.read(1)
            stream.seek(data)
            stream.write(bytes([first ^ 1]))


def flip_in_new_files(checkpoint: Path) -> None:
    for file in checkpoint.glob("*.safetensors"):
        other = file.with_suffix(".new")
        shutil.copy2(file, other)
        other.replace(file)
    flip_in_place(checkpoint)


def change_config(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text(json.dumps(config(quant=quantization(), hidden_act="gelu")))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (touch, "model-00001-of-00002.safetensors"),
        (rewrite_weights, "model-0000"),
        (same_size_and_time(flip_in_place), "model-0000"),
        (same_size_and_time(flip_in_new_files), "model-0000"),
        (change_config, "config.json"),
    ],
)
def test_a_changed_source_makes_it_stale(
    checkpoint: Path,
    folder: Path,
    change: Callable[[Path], None],
    named: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    load(checkpoint, folder)
    change(checkpoint)
    with caplog.at_level(logging.WARNING, "int8moe.checkpoint"):
        again, states = load(checkpoint, folder)
    assert states == ["written", "written"]
    assert len(caplog.records) == 2
    for record in caplog.records:
        assert f"is stale: {named}" in record.getMessage()
    assert_same(again, int8moe.load_moe_layers(checkpoint))
    assert load(checkpoint, folder)[1] == ["read", "read"]


def test_a_source_that_changes_while_it_is_read_is_not_cached(
    checkpoint: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pack = int8moe.FusedMoE.process_weights_after_loading

    def touch_then_pack(self: int8moe.FusedMoE) -> None:
        touch(checkpoint)
        pack(self)

    monkeypatch.setattr(int8moe.FusedMoE, "process_weights_after_loading", touch_then_pack)
    with caplog.at_level(logging.WARNING, "int8moe.checkpoint"):
        _, states = load(checkpoint, folder)
    assert "failed" in states
    assert "changed while it was read" in caplog.text
