"""The packed cache: a warm one gives the layers that packing gives, and packs nothing."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from cached_layers import assert_same, files, load
from checkpoint_builder import KEY, config, tensors, write
from safetensors import safe_open

import int8moe
import int8moe.checkpoint.load as load_module
from int8moe.checkpoint import PackedCache


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
