"""The packed cache: what it holds is used only while it is what would be packed now, and nothing is half written."""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_builder import KEY, config, quantization, tensors, write
from safetensors import safe_open

import int8moe
import int8moe.checkpoint.load as load_module
from int8moe.checkpoint import PackedCache, packed_cache, packed_file, safetensors_file

COMMAND = [sys.executable, "-c", "from int8moe.cli import main; main()"]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write(tmp_path / "model", config(quant=quantization()), tensors(), shards=2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def load(checkpoint: Path, folder: Path, *, kernel: str | None = None, **options: Any) -> tuple[Any, list[str]]:
    """The layers, and what the cache did for each."""
    cache = PackedCache(folder, **options)
    layers = int8moe.load_moe_layers(checkpoint, kernel=kernel, cache=cache)
    return layers, [cache.outcomes[key].state for key in layers]


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


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


@pytest.mark.parametrize("kernel", [None, "reference.torch"])
@pytest.mark.parametrize("mmap", [False, True])
def test_a_warm_cache_gives_the_same_layers_without_packing(
    checkpoint: Path, folder: Path, kernel: str | None, mmap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cold, states = load(checkpoint, folder, kernel=kernel)
    assert states == ["written", "written"]

    def packs(self: object, *arguments: object, **options: object) -> None:
        raise AssertionError("packed again")

    monkeypatch.setattr(int8moe.ExpertWeights, "pack", packs)
    warm, states = load(checkpoint, folder, kernel=kernel, mmap=mmap)
    assert states == ["read", "read"]
    assert_same(warm, cold)


@pytest.mark.parametrize("mmap", [False, True])
def test_restoring_and_reloading_leave_the_file_as_it_is(checkpoint: Path, folder: Path, mmap: bool) -> None:
    load(checkpoint, folder)
    before = [file.read_bytes() for file in files(folder)]
    warm, states = load(checkpoint, folder, mmap=mmap)
    assert states == ["read", "read"]
    canonical = int8moe.load_moe_layers(checkpoint, kernel="reference.torch")
    for key, layer in warm.items():
        layer.restore_weights()
        assert torch.equal(layer.w13_weight, canonical[key].w13_weight)
        assert torch.equal(layer.w2_weight, canonical[key].w2_weight)
        layer.process_weights_after_loading()
    assert_same(warm, int8moe.load_moe_layers(checkpoint))
    assert [file.read_bytes() for file in files(folder)] == before


def test_a_file_is_safetensors_whose_data_starts_at_a_page(checkpoint: Path, folder: Path) -> None:
    layers, _ = load(checkpoint, folder)
    (first, _) = files(folder)
    header = int.from_bytes(first.read_bytes()[:8], "little")
    assert (8 + header) % 4096 == 0
    state = layers[KEY.format(0)].state_dict()
    with safe_open(str(first), framework="pt") as stored:
        for name in stored.keys():  # noqa: SIM118
            assert torch.equal(stored.get_tensor(name), state[name])
        assert set(stored.keys()) == set(state) - {"_extra_state"}


def test_quantising_while_loading_is_cached_too(tmp_path: Path, folder: Path) -> None:
    checkpoint = write(tmp_path / "floats", config(), tensors(quantized=False))
    cold = int8moe.load_moe_layers(checkpoint, quantize=True, cache=PackedCache(folder))
    cache = PackedCache(folder)
    assert_same(int8moe.load_moe_layers(checkpoint, quantize=True, cache=cache), cold)
    assert {outcome.state for outcome in cache.outcomes.values()} == {"read"}


def test_without_create_nothing_is_written_where_nothing_was(checkpoint: Path, folder: Path) -> None:
    _, states = load(checkpoint, folder, create=False)
    assert states == ["absent", "absent"]
    assert not folder.exists()


def test_layers_partly_in_the_cache_keep_their_order(checkpoint: Path, folder: Path) -> None:
    int8moe.load_moe_layers(checkpoint, layers=[1], cache=PackedCache(folder))
    layers, states = load(checkpoint, folder)
    assert states == ["written", "read"]
    assert list(layers) == [KEY.format(0), KEY.format(1)]


def test_after_an_interrupt_no_layer_is_kept(checkpoint: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    int8moe.load_moe_layers(checkpoint, layers=[0], cache=PackedCache(folder))
    made: list[weakref.ref[int8moe.FusedMoE]] = []

    class Recorded(int8moe.FusedMoE):
        def __init__(self, *args: Any, **keywords: Any) -> None:
            super().__init__(*args, **keywords)
            made.append(weakref.ref(self))

    def interrupt(key: str, done: int, total: int) -> None:
        if done == total:
            raise KeyboardInterrupt

    monkeypatch.setattr(load_module, "FusedMoE", Recorded)
    with pytest.raises(KeyboardInterrupt) as caught:
        int8moe.load_moe_layers(checkpoint, progress=interrupt, cache=PackedCache(folder))
    gc.collect()
    assert len(made) == 3  # layer 0 of the cache; layer 1, which is not in it, and again to be read
    assert [reference() for reference in made] == [None] * 3
    assert caught.value.__traceback__ is not None  # it is kept, and holds nothing
    assert len(files(folder)) == 1


# ---- what no longer fits is reported in one line, and written again ----------------------------------------------


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


def touch(checkpoint: Path) -> None:
    os.utime(checkpoint / "model-00001-of-00002.safetensors", (1, 1))


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


# ---- what cannot be written is reported, and the work goes on -----------------------------------------------------


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
