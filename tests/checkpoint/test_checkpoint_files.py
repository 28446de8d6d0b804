"""Damaged, missing and hostile files: one CheckpointError that names them, whatever the bytes."""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_builder import config, quantization, tensors, write
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from int8moe.checkpoint import inspect_checkpoint, load_moe_layers
from int8moe.checkpoint.stamps import Stamps, content_digest
from int8moe.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SHARD = "model-00002-of-00003.safetensors"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write(tmp_path / "sharded", config(quant=quantization()), tensors(), shards=3)


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return write(tmp_path / "single", config(quant=quantization()), tensors())


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_moe_layers(folder)
    text = str(caught.value)
    assert "\n" not in text
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    return text


def rewrite_header(file: Path, header: bytes, length: int | None = None) -> None:
    raw = file.read_bytes()
    old = struct.unpack("<Q", raw[:8])[0]
    file.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + raw[8 + old :])


def header_of(file: Path) -> dict[str, dict[str, object]]:
    raw = file.read_bytes()
    found: dict[str, dict[str, object]] = json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])
    return found


def test_missing_shard_is_named_with_what_it_held(sharded: Path) -> None:
    (sharded / SHARD).unlink()
    text = refusal(sharded)
    assert f"{SHARD} is missing" in text
    assert "_proj.weight" in text
    assert "of experts 0" in text


def test_truncated_shard_is_named_with_what_is_cut_off(sharded: Path) -> None:
    file = sharded / SHARD
    file.write_bytes(file.read_bytes()[:-100])
    text = refusal(sharded)
    assert f"{SHARD} is truncated" in text
    assert "lost are" in text
    assert "of expert" in text


def test_several_damaged_shards_are_told_at_once(sharded: Path) -> None:
    (sharded / SHARD).write_bytes(b"")
    (sharded / "model-00003-of-00003.safetensors").unlink()
    text = refusal(sharded)
    assert f"{SHARD} is truncated: 0 bytes" in text
    assert "model-00003-of-00003.safetensors is missing" in text


@pytest.mark.parametrize("length", [2**63 - 1, 2**64 - 1, 10**8 + 1])
def test_absurd_header_length(single: Path, length: int) -> None:
    rewrite_header(single / "model.safetensors", b"{}", length)
    assert "model.safetensors has an absurd header length" in refusal(single)


def test_header_longer_than_the_file(single: Path) -> None:
    rewrite_header(single / "model.safetensors", b"{}", 10**8)
    assert "model.safetensors is truncated: its header takes" in refusal(single)


@pytest.mark.parametrize(
    ("header", "found"),
    [
        (b"{", "not valid JSON"),
        (b"\xff\xfe{}", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"a": {"dtype": "I8"}, "a": {}}', "'a' stands there twice"),
        (b"[]", "not a JSON object"),
        (b'{"a": 3}', "without dtype, shape and data_offsets for a"),
        (b'{"a": {"dtype": "I8", "shape": [4], "data_offsets": [0]}}', "without dtype"),
        (b'{"a": {"dtype": "I8", "shape": [-4], "data_offsets": [0, 4]}}', "impossible shape"),
        (b'{"a": {"dtype": "I8", "shape": 4, "data_offsets": [0, 4]}}', "impossible shape"),
        (b'{"a": {"dtype": "I8", "shape": [4], "data_offsets": [4, 0]}}', "impossible"),
        (b'{"a": {"dtype": "I8", "shape": [4], "data_offsets": [0, 1e3]}}', "impossible"),
        (b'{"a": {"dtype": "BF16", "shape": [4], "data_offsets": [0, 4]}}', "which is not BF16 [4]"),
        (b'{"a": {"dtype": "I8", "shape": [4], "data_offsets": [4, 8]}}', "after a hole"),
        (
            b'{"a": {"dtype": "I8", "shape": [4], "data_offsets": [0, 4]},'
            b' "b": {"dtype": "I8", "shape": [4], "data_offsets": [2, 6]}}',
            "overlaps",
        ),
        (b"{}", "bytes after its last tensor"),
    ],
)
def test_bad_headers(single: Path, header: bytes, found: str) -> None:
    rewrite_header(single / "model.safetensors", header)
    text = refusal(single)
    assert "model.safetensors" in text
    assert found in text


def test_git_lfs_pointer(single: Path) -> None:
    (single / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    assert "git-lfs pointer" in refusal(single)


def make_fifo(file: Path) -> None:
    os.mkfifo(file)


def make_socket(file: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(file.name)  # the whole path may be longer than an address


def make_device(file: Path) -> None:
    file.symlink_to("/dev/zero")


@pytest.mark.skipif(sys.platform == "win32", reason="has no such files")
@pytest.mark.parametrize("name", ["config.json", INDEX, SHARD, "model.safetensors"])
@pytest.mark.parametrize("make", [make_fifo, make_socket, make_device])
def test_only_regular_files_are_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, make: Callable[[Path], None]
) -> None:
    shards = 1 if name == "model.safetensors" else 3
    folder = write(tmp_path / "model", config(quant=quantization()), tensors(), shards=shards)
    (folder / name).unlink()
    monkeypatch.chdir(folder)
    make(folder / name)
    text = refusal(folder)
    assert name in text
    assert "cannot be read: it is not a regular file, but a FIFO, a socket or a device" in text
    with pytest.raises(CheckpointError, match="it is not a regular file"):
        content_digest(folder / name)
    with pytest.raises(CheckpointError, match="it is not a regular file"):
        Stamps().of(folder / name)


def test_paths_that_are_no_checkpoint(tmp_path: Path, single: Path) -> None:
    assert "no such directory" in refusal(tmp_path / "nowhere")
    assert "is a file" in refusal(single / "model.safetensors")
    pickled = tmp_path / "model.bin"
    pickled.write_bytes(b"")
    assert "pickles never" in refusal(pickled)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "holds no config.json" in refusal(empty)


def test_directory_without_safetensors(tmp_path: Path) -> None:
    folder = write(tmp_path, config(quant=quantization()), None)
    assert "holds no safetensors file" in refusal(folder)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    text = refusal(folder)
    assert "pytorch_model.bin" in text
    assert "only safetensors files are read, pickles never" in text
    (folder / "pytorch_model.bin").unlink()
    save_file({"a": torch.zeros(1)}, str(folder / "adapter.safetensors"))
    assert "holds adapter.safetensors, but neither" in refusal(folder)


@pytest.mark.parametrize("text", ["{", "", "[1]", "\x00", '"x"', "[" * 100_000])
def test_bad_config_json(single: Path, text: str) -> None:
    (single / "config.json").write_text(text)
    assert "config.json" in refusal(single)


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": [1]}', '{"weight_map": {"a": 3}}']
)
def test_bad_index(sharded: Path, text: str) -> None:
    (sharded / INDEX).write_text(text)
    assert INDEX in refusal(sharded)


@pytest.mark.parametrize(
    "shard",
    ["../outside.safetensors", "/etc/outside.safetensors", "a/../../outside.safetensors", "..\\outside.safetensors",
     "C:\\outside.safetensors", "config.json", "", "a\0.safetensors"],
)  # fmt: skip
def test_an_index_cannot_leave_the_directory(sharded: Path, shard: str) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = shard
    (sharded / INDEX).write_text(json.dumps(index))
    text = refusal(sharded)
    assert "lm_head.weight" in text
    assert "allowed are names of safetensors files below" in text


def test_an_index_of_pickles(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = "pytorch_model.bin"
    (sharded / INDEX).write_text(json.dumps(index))
    assert "pickles never" in refusal(sharded)


def test_index_and_shards_have_to_agree(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    here = index["weight_map"][name]
    there = next(s for s in index["weight_map"].values() if s != here)
    index["weight_map"][name] = there
    index["weight_map"]["model.layers.0.mlp.experts.9.up_proj.weight"] = there
    (sharded / INDEX).write_text(json.dumps(index))
    text = refusal(sharded)
    assert f"{name} should be in {there}, and is in {here}" in text
    assert f"experts.9.up_proj.weight should be in {there}, and is in no file" in text


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    folder = write(tmp_path, config(quant=quantization()), tensors(), shards=2)
    first = folder / "model-00001-of-00002.safetensors"
    name = next(n for n in header_of(folder / "model-00002-of-00002.safetensors") if "experts.1.down_proj" in n)
    stored = {k: v for k, v in tensors().items() if k in header_of(first) or k == name}
    save_file(stored, str(first))
    assert f"{name} is stored in both" in refusal(folder)


def test_shards_without_an_index(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    assert len(load_moe_layers(sharded)) == 2
    (sharded / SHARD).unlink()
    assert f"{SHARD} is missing" in refusal(sharded)


def test_symlinked_files_as_in_a_hub_cache(tmp_path: Path, sharded: Path) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for file in sharded.iterdir():
        (snapshot / file.name).symlink_to(file)
    assert len(load_moe_layers(snapshot)) == 2
    (sharded / SHARD).unlink()
    assert f"{SHARD} is missing" in refusal(snapshot)


def test_one_whole_file_goes_before_an_index(sharded: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_file(tensors(), str(sharded / "model.safetensors"))
    (sharded / SHARD).unlink()
    assert len(load_moe_layers(sharded)) == 2
    assert "model.safetensors is read" in caplog.text


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_change_of_bytes_loads_or_is_a_checkpoint_error(tmp_path: Path, data: st.DataObject) -> None:
    folder = tmp_path / "fuzz"
    stored = tensors(layers=1, experts=2, hidden=4, width=2)
    write(folder, config(quant=quantization(), num_hidden_layers=1, num_experts=2, hidden_size=4,
                         moe_intermediate_size=2), stored)  # fmt: skip
    file = folder / data.draw(st.sampled_from(["model.safetensors", "config.json"]))
    raw = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(bytes(raw[: data.draw(st.integers(0, len(raw)) | st.just(len(raw)))]))
    try:
        inspect_checkpoint(folder)
        load_moe_layers(folder, quantize=True, kernel="reference.torch")
    except CheckpointError as error:
        lines = str(error).count("\n")
    else:
        lines = 0
    assert lines == 0
