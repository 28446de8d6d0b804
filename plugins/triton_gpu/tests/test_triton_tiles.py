"""The tables of tiles, and the files of tuned ones. Needs no triton."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from int8moe.errors import ConfigError
from int8moe_triton_gpu import tuned
from int8moe_triton_gpu.devices import Device, refusal
from int8moe_triton_gpu.tiles import SCHEMA, Steps, default_steps

H100 = Device("cuda", "sm_90", "NVIDIA H100 80GB HBM3", "sm_90")
FAMILIES = ("sm_80", "sm_90", "gfx942", "interpreter")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_number_of_rows_has_a_tile(family: str) -> None:
    steps = default_steps(family)
    assert steps.step(1, 8).one_row
    assert not steps.step(steps.one_row_slots + 1, 8).one_row
    heights = [steps.step(slots, 8).step.gate_up.block_m for slots in range(steps.one_row_slots + 1, 10_000, 37)]
    assert heights == sorted(heights)
    assert len(set(heights)) > 1, "more rows an expert take a higher tile"
    steps.step(10**6, 0)  # a rank without an expert


def test_a_depth_that_loads_byte_by_byte_takes_a_small_tile() -> None:
    steps = default_steps("sm_90")
    tile = steps.sorted[-1].down
    assert steps.fitted(tile, 2880) == tile
    small = steps.fitted(tile, 100)
    assert (small.block_m, small.block_n, small.block_k) == (tile.block_m, 32, 32)
    assert default_steps("interpreter").fitted(tile, 100) == tile


def test_unknown_family_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="sm_80, sm_90, gfx942, interpreter"):
        default_steps("sm_12")


def document(**changes: object) -> dict[str, object]:
    steps = default_steps("sm_90").model_dump()
    steps["one_row_slots"] = 5  # to be told from the defaults
    plain = {
        "schema_version": SCHEMA, "device": H100.name, "architecture": "sm_90", "triton": "3.9.0",
        "num_experts": 128, "intermediate_size": 768, "hidden_size": 2048, "steps": steps,
    }  # fmt: skip
    return plain | changes


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    """Where tuned files of this user lie."""
    monkeypatch.setenv("INT8MOE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuned, "find_device", lambda device: H100)
    tuned._steps_for.cache_clear()
    made = tmp_path / "tuned" / "triton_gpu"
    made.mkdir(parents=True)
    yield made
    tuned._steps_for.cache_clear()


def steps_for(experts: int = 128) -> Steps:
    return tuned.steps_for(torch.device("cuda", 0), experts, 768, 2048)


def test_a_tuned_file_is_taken_and_told_once(folder: Path, caplog) -> None:
    name = "sm_90-NVIDIA_H100_80GB_HBM3-E128-I768-H2048.json"
    (folder / name).write_text(json.dumps(document()))
    with caplog.at_level(logging.INFO, "int8moe.triton_gpu"):
        assert steps_for().one_row_slots == 5
        steps_for()
    assert [record.getMessage() for record in caplog.records] == [f"tuned tiles of {folder / name}"]


def test_without_a_file_the_defaults_serve_and_the_log_says_so(folder: Path, caplog) -> None:
    with caplog.at_level(logging.INFO, "int8moe.triton_gpu"):
        assert steps_for(64) == default_steps("sm_90")
        steps_for(64)
    (record,) = caplog.records
    assert "no tuned tiles for E 64, I 768, H 2048 on NVIDIA H100" in record.getMessage()
    assert "`int8moe tune` measures" in record.getMessage()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not a file of tuned tiles"),
        ("[]", "not a file of tuned tiles"),
        (json.dumps(document(schema_version=99)), "schema 99, this release reads 1"),
        (json.dumps(document(extra=1)), "not a file of tuned tiles"),
    ],
)
def test_a_damaged_file_is_one_clear_error(folder: Path, text: str, words: str) -> None:
    path = folder / tuned.file_name(H100, 128, 768, 2048)
    path.write_text(text)
    with pytest.raises(ConfigError, match=words) as error:
        steps_for()
    assert str(path) in str(error.value)
    assert "int8moe tune again" in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"device": "NVIDIA A100"},
        {"architecture": "sm_80"},
        {"num_experts": 64},
        {"intermediate_size": 1},
        {"hidden_size": 1},
    ],
)
def test_a_file_that_was_measured_for_something_else_is_refused(folder: Path, changes: dict[str, object]) -> None:
    """Copied or renamed: the name is right, what it holds is of another device or layer."""
    path = folder / tuned.file_name(H100, 128, 768, 2048)
    path.write_text(json.dumps(document(**changes)))
    with pytest.raises(ConfigError, match=f"measured on .*{next(iter(changes.values()))}") as error:
        steps_for()
    assert str(path) in str(error.value)
    assert "int8moe tune again" in str(error.value)


def test_a_folder_that_cannot_be_looked_into_is_told_and_the_defaults_serve(folder: Path, monkeypatch, caplog) -> None:
    def refused(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", refused)
    steps = default_steps("sm_90")
    with caplog.at_level(logging.WARNING, "int8moe.triton_gpu"):
        assert steps_for() == steps
    assert f"{folder}: Permission denied" in caplog.text
    assert "INT8MOE_CACHE_DIR" in caplog.text


def spoiled(change) -> dict[str, object]:
    steps = json.loads(default_steps("sm_90").model_dump_json())
    change(steps)
    return steps


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s["one_row"]["gate_up"].update(block_n=48), "block_n = 48 is not a power of two"),
        (lambda s: s["one_row"]["gate_up"].update(block_m=8), "greater than or equal to 16"),
        (lambda s: s["one_row"]["down"].update(block_m=32), "gate_up.block_m 16 differs from down.block_m 32"),
        (lambda s: s["sorted"].pop(), "rows_per_expert has to ascend and end with null"),
        (lambda s: s["sorted"].reverse(), "rows_per_expert has to ascend and end with null"),
        (lambda s: s.update(elements=1000), "elements = 1000 is not a power of two"),
    ],
)
def test_tiles_that_cannot_be_cut_are_refused(change, words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        Steps.model_validate(spoiled(change))


@pytest.mark.parametrize(
    ("device", "words"),
    [
        (H100, None),
        (Device("cuda", "sm_80", "NVIDIA A100", "sm_80"), None),
        (Device("cuda", "sm_90", "NVIDIA B200", "sm_100"), None),
        (Device("cuda", "sm_80", "Tesla T4", "sm_75"), "Tesla T4 is sm_75; the kernels are for sm_80 and newer"),
        (Device("hip", "gfx942", "AMD Instinct MI300X", "gfx942"), None),
        (Device("hip", "gfx1100", "Radeon", "gfx1100"), "Radeon is gfx1100; the kernels are for gfx942"),
    ],
)
def test_architectures(device: Device, words: str | None) -> None:
    assert refusal(device) == words
