"""Writing W8A8 checkpoints: what is written loads to the bits of quantising on the fly, whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock
import pytest
import torch
from checkpoint_builder import EXPERTS, KEY, LAYERS, config, quantization, sample_checkpoints, tensors, write
from format_builder import fuse, model_config, with_biases
from safetensors.torch import load_file

import int8moe
from int8moe.checkpoint import inspect_checkpoint, quantize_checkpoint, safetensors_file, w8a8_writer

SAMPLES = sample_checkpoints()
PARAMETERS = ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale", "w13_bias", "w2_bias")
SHARD = 6144  # bytes: some five shards of the tiny checkpoints

KILLED = """
import os, signal, sys
from int8moe.checkpoint import quantize_checkpoint
def progress(name, done, total):
    if done > total // 2:
        os.kill(os.getpid(), signal.SIGKILL)
quantize_checkpoint(sys.argv[1], sys.argv[2], max_shard_bytes=int(sys.argv[3]), progress=progress)
"""


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(str(file)).items()}


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def assert_quantised_alike(source: Path, target: Path) -> None:
    wanted = int8moe.load_moe_layers(source, quantize=True, kernel="reference.torch")
    found = int8moe.load_moe_layers(target, kernel="reference.torch")
    assert list(found) == list(wanted)
    for key, layer in found.items():
        for name in PARAMETERS:
            one, other = getattr(layer, name), getattr(wanted[key], name)
            assert (one is None) == (other is None)
            assert one is None or torch.equal(one, other)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = write(tmp_path / "source", config(), tensors(quantized=False), shards=2)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "generation_config.json").write_text('{"eos_token_id": 0}')
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    (folder / "original").mkdir()
    return folder


@pytest.mark.parametrize("layout", ["per expert", "fused"])
def test_experts_with_biases(tmp_path: Path, layout: str) -> None:
    """gpt_oss: of the fused form the experts are transposed and interleaved, and written one by one all the same."""
    before = with_biases(tensors(quantized=False))
    on_disk = fuse(before, transposed=True, interleaved=True) if layout == "fused" else before
    source = write(tmp_path / "source", model_config("gpt_oss"), on_disk)
    quantize_checkpoint(source, tmp_path / "target")
    assert_quantised_alike(source, tmp_path / "target")
    after = stored(tmp_path / "target")
    assert set(after) == {*before, *(f"{n}_scale" for n in before if ".experts." in n and n.endswith(".weight"))}
    for name, bias in before.items():
        assert not name.endswith("bias") or torch.equal(after[name], bias)


@pytest.mark.parametrize("layout", ["per expert", "fused"])
def test_a_base_model_saved_alone(tmp_path: Path, layout: str) -> None:
    """Its names lack "model.", and go on lacking it."""
    before = tensors(quantized=False)
    del before["lm_head.weight"]
    whole = fuse(before) if layout == "fused" else before
    alone = {name.removeprefix("model."): tensor for name, tensor in whole.items()}
    source = write(tmp_path / "source", config(), alone)
    quantize_checkpoint(source, tmp_path / "target")
    assert_quantised_alike(source, tmp_path / "target")
    after = stored(tmp_path / "target")
    assert {name.removesuffix("_scale") for name in after} == {name.removeprefix("model.") for name in before}


def test_prediction_heads_stay_as_they_are(tmp_path: Path) -> None:
    before = tensors(quantized=False)
    drafts = {n.replace("model.layers.0", "mtp.layers.0"): t.clone() for n, t in before.items() if ".layers.0." in n}
    source = write(tmp_path / "source", model_config("qwen3_next"), {**before, **drafts})
    quantize_checkpoint(source, tmp_path / "target")
    assert_quantised_alike(source, tmp_path / "target")
    assert [layer.name for layer in inspect_checkpoint(tmp_path / "target").skipped] == ["mtp.layers.0"]
    after = stored(tmp_path / "target")
    for name, tensor in drafts.items():
        assert torch.equal(after[name], tensor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("spelling", ["qwen3_moe", "qwen2_moe", "mixtral", "mixtral-w123"])
def test_round_trip(tmp_path: Path, spelling: str, dtype: torch.dtype) -> None:
    before = tensors(spelling, quantized=False, float_dtype=dtype)
    source = write(tmp_path / "source", config(spelling), before)
    result = quantize_checkpoint(source, tmp_path / "target")
    assert result.layers == tuple(KEY.format(index) for index in range(LAYERS))
    assert result.num_experts == LAYERS * EXPERTS
    assert_quantised_alike(source, tmp_path / "target")
    after = stored(tmp_path / "target")
    for name, tensor in before.items():
        if ".experts." in name:  # names stay as they are spelt
            assert after.pop(name).dtype == torch.int8
            scale = after.pop(f"{name}_scale")
            assert scale.dtype == torch.float32
            assert scale.shape == (tensor.shape[0], 1)
        else:
            assert torch.equal(after.pop(name), tensor)
    assert not after


@pytest.mark.parametrize("name", ["trained-qwen3moe-bf16", "micro-bf16", "mixtral-bf16", "qwen3_moe-bf16-fused3d"])
def test_samples(tmp_path: Path, name: str) -> None:
    if SAMPLES is None or not (SAMPLES / name).is_dir():
        pytest.skip("INT8MOE_TEST_CHECKPOINTS names no folder with this sample")
    quantize_checkpoint(SAMPLES / name, tmp_path / "target", max_shard_bytes=1 << 20)
    assert_quantised_alike(SAMPLES / name, tmp_path / "target")


def test_fused_experts_are_split_into_the_names_that_readers_know(tmp_path: Path) -> None:
    per_expert = tensors(quantized=False)
    fused = {name: tensor for name, tensor in per_expert.items() if ".experts." not in name}
    for layer in range(LAYERS):
        key = KEY.format(layer)

        def stack(role: str, key: str = key) -> torch.Tensor:
            return torch.stack([per_expert[f"{key}.{expert}.{role}_proj.weight"] for expert in range(EXPERTS)])

        fused[f"{key}.gate_up_proj"] = torch.cat([stack("gate"), stack("up")], dim=1)
        fused[f"{key}.down_proj"] = stack("down")
    quantize_checkpoint(write(tmp_path / "fused", config(), fused), tmp_path / "one")
    quantize_checkpoint(write(tmp_path / "per expert", config(), per_expert), tmp_path / "other")
    one, other = stored(tmp_path / "one"), stored(tmp_path / "other")
    assert sorted(one) == sorted(other)
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_odd_sizes_are_aligned_for_every_reader(tmp_path: Path) -> None:
    before = tensors(quantized=False, hidden=7, width=5, experts=3)
    source = write(tmp_path / "source", config(hidden_size=7, moe_intermediate_size=5, num_experts=3), before, shards=1)
    quantize_checkpoint(source, tmp_path / "target")
    assert_quantised_alike(source, tmp_path / "target")


def test_what_stays_is_on_the_ignore_list_and_files_are_copied(source: Path, tmp_path: Path) -> None:
    result = quantize_checkpoint(source, tmp_path / "target", max_shard_bytes=SHARD)
    target = tmp_path / "target"
    written = json.loads((target / "config.json").read_text())
    quantized = written.pop("quantization_config")
    assert written == json.loads((source / "config.json").read_text())
    assert quantized["quant_method"] == "compressed-tensors"
    assert quantized["format"] == "int-quantized"
    assert quantized["ignore"] == ["lm_head", *(f"model.layers.{index}.mlp.gate" for index in range(LAYERS))]
    assert result.copied == ("generation_config.json", "tokenizer.json")
    names = {"config.json", "model.safetensors.index.json", *result.copied, *result.shards}
    assert set(contents(target)) == names
    assert len(result.shards) > 4
    assert all((target / shard).stat().st_size < 2 * SHARD for shard in result.shards)
    weight_map = json.loads((target / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(weight_map.values()) == set(result.shards)
    assert inspect_checkpoint(target).scheme == "compressed-tensors W8A8 (channel)"


def test_progress_counts_every_byte_of_the_source(source: Path, tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    result = quantize_checkpoint(
        source, tmp_path / "target", max_shard_bytes=SHARD, progress=lambda *call: calls.append(call)
    )
    assert calls[-1][1:] == (result.source_bytes, result.source_bytes)
    assert [done for _, done, _ in calls] == sorted(done for _, done, _ in calls)
    assert tuple(dict.fromkeys(name for name, _, _ in calls)) == result.shards


# ---- a run that ends early ---------------------------------------------------------------------------------------


def kill_in_the_middle(source: Path, target: Path) -> Path:
    process = subprocess.run(
        [sys.executable, "-c", KILLED, str(source), str(target), str(SHARD)], check=False, timeout=120
    )
    assert process.returncode == -signal.SIGKILL
    assert not target.exists()
    return target.with_name(f"{target.name}.partial")


def test_a_killed_run_is_continued(source: Path, tmp_path: Path) -> None:
    quantize_checkpoint(source, tmp_path / "wanted", max_shard_bytes=SHARD)
    partial = kill_in_the_middle(source, tmp_path / "target")
    whole = {file.name: file.stat().st_ino for file in partial.glob("model-*")}
    assert whole
    assert list(partial.glob(".model-*"))  # the shard that was being written
    result = quantize_checkpoint(source, tmp_path / "target", max_shard_bytes=SHARD)
    assert set(result.resumed) == set(whole)
    assert len(result.resumed) < len(result.shards)
    for name, inode in whole.items():
        assert (tmp_path / "target" / name).stat().st_ino == inode
    assert contents(tmp_path / "target") == contents(tmp_path / "wanted")
    assert not partial.exists()


def test_a_shard_that_was_damaged_meanwhile_is_written_again(source: Path, tmp_path: Path) -> None:
    quantize_checkpoint(source, tmp_path / "wanted", max_shard_bytes=SHARD)
    partial = kill_in_the_middle(source, tmp_path / "target")
    damaged = min(partial.glob("model-*"))
    os.truncate(damaged, damaged.stat().st_size - 1)
    result = quantize_checkpoint(source, tmp_path / "target", max_shard_bytes=SHARD)
    assert damaged.name not in result.resumed
    assert contents(tmp_path / "target") == contents(tmp_path / "wanted")


def test_what_another_run_began_is_not_continued(source: Path, tmp_path: Path) -> None:
    partial = kill_in_the_middle(source, tmp_path / "target")
    before = contents(partial)
    with pytest.raises(int8moe.CheckpointError, match="begun from another source, or with other options; remove it"):
        quantize_checkpoint(source, tmp_path / "target", max_shard_bytes=2 * SHARD)
    os.utime(next(source.glob("model-*")), (1, 1))
    with pytest.raises(int8moe.CheckpointError, match="begun from another source"):
        quantize_checkpoint(source, tmp_path / "target", max_shard_bytes=SHARD)
    assert contents(partial) == before
    foreign = tmp_path / "other.partial"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("mine")
    with pytest.raises(int8moe.CheckpointError, match="holds other files"):
        quantize_checkpoint(source, tmp_path / "other")
    assert (foreign / "thesis.txt").read_text() == "mine"


def test_two_processes_do_not_write_the_same_destination(source: Path, tmp_path: Path) -> None:
    partial = tmp_path / "target.partial"
    partial.mkdir()
    with (
        filelock.FileLock(partial / "quantize.lock"),
        pytest.raises(int8moe.CheckpointError, match="is being written by another process"),
    ):
        quantize_checkpoint(source, tmp_path / "target")
    quantize_checkpoint(source, tmp_path / "target")  # whoever held it has gone


def test_a_full_disk_is_one_error_and_the_run_goes_on_later(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, written = os.fsync, []

    def full(descriptor: int) -> None:
        written.append(descriptor)
        if len(written) > 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    monkeypatch.setattr(safetensors_file.os, "fsync", full)
    with pytest.raises(int8moe.CheckpointError, match="No space left on device; mend that and run the same again"):
        quantize_checkpoint(source, tmp_path / "target", max_shard_bytes=SHARD)
    assert not (tmp_path / "target").exists()
    assert not list((tmp_path / "target.partial").glob(".*"))
    monkeypatch.undo()
    assert len(quantize_checkpoint(source, tmp_path / "target", max_shard_bytes=SHARD).resumed) == 3


def test_too_little_room_is_found_before_anything_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(w8a8_writer.shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 20_000, 20_000))
    with pytest.raises(int8moe.CheckpointError, match="still to be written, and 20,000 are free there"):
        quantize_checkpoint(source, tmp_path / "target")
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


# ---- what is refused ---------------------------------------------------------------------------------------------


def quantised(tmp_path: Path) -> Path:
    return write(tmp_path / "bad", config(quant=quantization()), tensors())


def half_quantised(tmp_path: Path) -> Path:
    ignore = [r"re:.*layers\.0\..*", "re:.*gate$", "lm_head"]
    floats, integers = tensors(quantized=False), tensors()
    mixed = {name: tensor for name, tensor in integers.items() if ".layers.0." not in name}
    mixed |= {name: tensor for name, tensor in floats.items() if ".layers.0." in name}
    return write(tmp_path / "bad", config(quant=quantization(ignore=ignore)), mixed)


def dense(tmp_path: Path) -> Path:
    return write(tmp_path / "bad", config(mlp_only_layers=[0, 1]), tensors(quantized=False))


def with_nan(tmp_path: Path) -> Path:
    floats = tensors(quantized=False)
    floats[f"{KEY.format(1)}.3.up_proj.weight"][2, 5] = float("nan")
    return write(tmp_path / "bad", config(), floats)


def absent(tmp_path: Path) -> Path:
    return tmp_path / "bad"


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (quantised, "is quantised already"),
        (half_quantised, "is quantised already"),
        (dense, "none of the 2 layers is a mixture of experts"),
        (with_nan, r"model.layers.1.mlp.experts.3.up_proj.weight \(expert 3\) holds a NaN or an Inf in row 2"),
        (absent, "no such directory"),
    ],
)
def test_sources_that_are_refused(tmp_path: Path, make: Callable[[Path], Path], told: str) -> None:
    with pytest.raises(int8moe.CheckpointError, match=told) as caught:
        quantize_checkpoint(make(tmp_path), tmp_path / "target")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("kind", ["folder", "file", "dangling link", "no parent"])
def test_destinations_that_are_refused(source: Path, tmp_path: Path, kind: str) -> None:
    target, told = tmp_path / "target", "exists already; choose another destination"
    if kind == "folder":
        target.mkdir()
    elif kind == "file":
        target.write_text("mine")
    elif kind == "dangling link":
        target.symlink_to(tmp_path / "nowhere")
    else:
        target, told = tmp_path / "nowhere" / "target", "no such directory; make it first"
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(int8moe.CheckpointError, match=told):
        quantize_checkpoint(source, target)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", ["", ".", "./", "..", "sub/..", "/", "//", "/.."])
def test_destinations_without_a_name_are_refused(
    source: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(int8moe.CheckpointError, match="names no new directory; give the name of one") as caught:
        quantize_checkpoint(source, name)
    assert "\n" not in str(caught.value)


def test_memory_holds_no_whole_tensor(tmp_path: Path) -> None:
    """A fused layer of 48 MiB is quantised within a fraction of it, beside the mapped pages of the files."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("needs Linux")
    experts, hidden, width = 16, 512, 1024
    before: dict[str, Any] = {
        f"{KEY.format(0)}.gate_up_proj": torch.zeros(experts, 2 * width, hidden, dtype=torch.bfloat16),
        f"{KEY.format(0)}.down_proj": torch.zeros(experts, hidden, width, dtype=torch.bfloat16),
    }
    sizes = {"num_experts": experts, "hidden_size": hidden, "moe_intermediate_size": width, "num_hidden_layers": 1}
    source = write(tmp_path / "source", config(**sizes), before)
    before.clear()
    tiny = write(tmp_path / "tiny", config(), tensors(quantized=False))
    script = f"""
import sys
from pathlib import Path
from int8moe.checkpoint import quantize_checkpoint
def anonymous():
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024
peak = 0
def progress(*call):
    global peak
    peak = max(peak, anonymous())
quantize_checkpoint({str(tiny)!r}, {str(tmp_path / "warm")!r}, progress=progress)
start, peak = anonymous(), 0
quantize_checkpoint({str(source)!r}, {str(tmp_path / "target")!r}, progress=progress)
print(peak - start)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=300)
    assert int(done.stdout) < 12 << 20
