"""What is loaded is what was stored, in every spelling, dtype, sharding, and without a second copy."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_builder import (
    EXPERTS,
    HIDDEN,
    KEY,
    PARAMETERS,
    SPELLINGS,
    TOP_K,
    assert_equal,
    config,
    expected,
    group,
    quantization,
    tensors,
    write,
)  # fmt: skip

import int8moe
from int8moe.checkpoint import inspect_checkpoint, load_moe_layers, load_router
from int8moe.checkpoint import load as load_module
from int8moe.errors import CheckpointError, NoKernelError
from int8moe.routing import select_experts


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("shards", [1, 3])
def test_every_spelling_loads_under_the_keys_of_transformers(tmp_path: Path, spelling: str, shards: int) -> None:
    stored = tensors(spelling)
    folder = write(tmp_path, config(spelling, quantization()), stored, shards)
    layers = load_moe_layers(folder, kernel="reference.torch")
    assert list(layers) == [KEY.format(0), KEY.format(1)]
    for index, (key, layer) in enumerate(layers.items()):
        assert layer.layer_name == key
        assert layer.kernel.name == "reference.torch"
        assert (layer.config.num_experts, layer.config.top_k) == (EXPERTS, TOP_K)
        assert_equal(layer, expected(stored, spelling, index))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("strategy", "shape"),
    [("channel", lambda n: (n, 1)), ("channel", lambda n: (n,)), ("tensor", lambda n: (1,)), ("tensor", lambda n: ()),
     ("tensor", lambda n: (1, 1))],
    ids=["N1", "N", "1", "scalar", "11"],
)  # fmt: skip
def test_scales_of_every_shape_and_dtype(
    tmp_path: Path, dtype: torch.dtype, strategy: str, shape: Callable[[int], tuple[int, ...]]
) -> None:
    stored = tensors(scale_dtype=dtype, scale_shape=shape)
    quant = quantization(group({"strategy": strategy}))
    layers = load_moe_layers(write(tmp_path, config(quant=quant), stored), kernel="reference.torch")
    assert_equal(layers[KEY.format(1)], expected(stored, "qwen3_moe", 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("spelling", ["qwen3_moe", "mixtral-w123", "fused"])
def test_float_layers_are_quantised_while_loading(
    tmp_path: Path, spelling: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    names = "qwen3_moe" if spelling == "fused" else spelling
    stored = tensors(names, quantized=False, float_dtype=dtype)
    module, (gate, up, down) = SPELLINGS[names]
    on_disk, wanted = dict(stored), []
    for index in range(2):
        base = module.format(layer=index)
        part = {p: torch.stack([stored[f"{base}.{e}.{p}.weight"] for e in range(EXPERTS)]) for p in (gate, up, down)}
        w13 = torch.cat([part[gate], part[up]], dim=1)
        wanted.append(dict(zip(PARAMETERS, int8moe.quantize_experts(w13, part[down]), strict=True)))
        if spelling == "fused":
            on_disk = {k: v for k, v in on_disk.items() if not k.startswith(base)}
            on_disk |= {f"{base}.gate_up_proj": w13, f"{base}.down_proj": part[down]}
    folder = write(tmp_path, config(names), on_disk)
    assert load_moe_layers(folder) == {}
    assert f"quantize=True quantises them): {KEY.format(0)}" in caplog.text
    layers = load_moe_layers(folder, quantize=True, kernel="reference.torch")
    for index, layer in enumerate(layers.values()):
        assert_equal(layer, wanted[index])


def test_quantising_a_few_rows_at_a_time_changes_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path, config(), tensors(quantized=False))
    whole = load_moe_layers(folder, quantize=True, kernel="reference.torch")
    for elements in (1, 100, 224):
        monkeypatch.setattr(load_module, "_QUANTIZE_ELEMENTS", elements)
        for key, layer in load_moe_layers(folder, quantize=True, kernel="reference.torch").items():
            assert_equal(layer, {name: getattr(whole[key], name) for name in PARAMETERS})


def test_chosen_layers(tmp_path: Path) -> None:
    folder = write(tmp_path, config(quant=quantization()), tensors())
    assert list(load_moe_layers(folder, layers=[1])) == [KEY.format(1)]
    assert list(load_moe_layers(folder, layers=iter([1, 0, 1]))) == [KEY.format(0), KEY.format(1)]
    assert load_moe_layers(folder, layers=[]) == {}
    with pytest.raises(CheckpointError, match="layer 2 is not an MoE layer of this model; those are 0, 1"):
        load_moe_layers(folder, layers=[0, 2])
    plan = inspect_checkpoint(folder)
    assert list(load_moe_layers(plan, layers=[0])) == [KEY.format(0)]


def test_an_unknown_kernel_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NoKernelError):
        load_moe_layers(write(tmp_path, config(quant=quantization()), tensors()), kernel="no.such")


@pytest.mark.parametrize("quantized", [True, False])
def test_progress_counts_the_bytes_on_disk(tmp_path: Path, quantized: bool) -> None:
    stored = tensors(quantized=quantized)
    folder = write(tmp_path, config(quant=quantization() if quantized else None), stored, shards=2)
    calls: list[tuple[str, int, int]] = []
    load_moe_layers(folder, quantize=True, progress=lambda *call: calls.append(call))
    total = sum(v.nbytes for k, v in stored.items() if ".experts." in k)
    assert [key for key, _, _ in calls] == [KEY.format(0)] * EXPERTS + [KEY.format(1)] * EXPERTS
    assert {whole for _, _, whole in calls} == {total}
    done = [done for _, done, _ in calls]
    assert done == sorted(done)
    assert done[-1] == total


def test_router_runs_the_layer(tmp_path: Path) -> None:
    for spelling in SPELLINGS:
        stored = tensors(spelling)
        plan = inspect_checkpoint(write(tmp_path / spelling, config(spelling, quantization()), stored))
        layer = plan.layers[1]
        assert layer.router is not None
        router = load_router(plan, 1)
        assert router.dtype == torch.float32
        assert torch.equal(router, stored[layer.router.name].float())
        assert torch.equal(router, load_router(plan, layer.key))
        x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(0))
        weights, ids = select_experts(
            x @ router.t(), layer.config.top_k, scoring=plan.routing.scoring, renormalize=plan.routing.renormalize
        )
        assert load_moe_layers(plan, layers=[1])[layer.key](x, weights, ids).shape == x.shape


def test_a_router_that_is_not_there_matters_only_to_who_asks(tmp_path: Path) -> None:
    stored = tensors()
    router = "model.layers.0.mlp.gate.weight"
    missing = {k: v for k, v in stored.items() if k != router}
    folder = write(tmp_path / "a", config(quant=quantization()), missing)
    assert len(load_moe_layers(folder)) == 2
    with pytest.raises(CheckpointError, match="router's weight"):
        load_router(inspect_checkpoint(folder), 0)
    odd = {**stored, router: torch.zeros(8, 31)}
    plan = inspect_checkpoint(write(tmp_path / "b", config(quant=quantization()), odd))
    with pytest.raises(CheckpointError, match=r"a router has .* \[8, 32\]"):
        load_router(plan, 0)
    with pytest.raises(CheckpointError, match="layer 9"):
        load_router(plan, 9)


def test_loading_leaves_nothing_mapped_and_writes_nothing(tmp_path: Path) -> None:
    folder = write(tmp_path, config(quant=quantization()), tensors(), shards=2)
    before = {file: file.read_bytes() for file in folder.iterdir()}
    layers = load_moe_layers(folder)
    maps = Path("/proc/self/maps")
    if maps.exists():
        assert str(folder) not in maps.read_text()
    assert {file: file.read_bytes() for file in folder.iterdir()} == before
    for file in folder.iterdir():
        file.unlink()
    x = torch.zeros(1, HIDDEN)
    assert layers[KEY.format(0)](x, torch.ones(1, 2), torch.tensor([[0, 1]])).shape == x.shape


def test_inspection_imports_no_torch(tmp_path: Path) -> None:
    folder = write(tmp_path, config(quant=quantization()), tensors(), shards=2)
    code = f"""
        import sys
        from int8moe.checkpoint import inspect_checkpoint
        plan = inspect_checkpoint({str(folder)!r})
        print([layer.key for layer in plan.layers], "torch" in sys.modules, "safetensors" in sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{[KEY.format(0), KEY.format(1)]} False False"
