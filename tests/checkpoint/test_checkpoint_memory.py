"""Loading takes the packed layers and about one expert of anonymous memory, in every layout."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoint_builder import config, quantization, tensors, write
from format_builder import fuse, model_config, with_biases

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")

MEASURE = """
import json, sys, threading, time
import torch
from int8moe.checkpoint import load_moe_layers

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

small, folder, kernel = sys.argv[1], sys.argv[2], sys.argv[3] or None
load_moe_layers(small, kernel=kernel, quantize=True)  # what torch and the kernel allocate once
peak, stop = [0], threading.Event()
def watch():
    while not stop.is_set():
        peak[0] = max(peak[0], anonymous())
        time.sleep(0.0005)
base = anonymous()
threading.Thread(target=watch, daemon=True).start()
started = time.perf_counter()
layers = load_moe_layers(folder, kernel=kernel, quantize=True)
seconds = time.perf_counter() - started
stop.set()
held = sum(tensor.untyped_storage().nbytes() for layer in layers.values()
           for tensor in (*layer.buffers(), *(layer.aux[name] for name in layer.aux)))
print(json.dumps({"extra": max(peak[0], anonymous()) - base - held, "held": held, "seconds": seconds,
                  "kernel": next(iter(layers.values())).kernel.name}))
"""


def measure(small: Path, big: Path, kernel: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(small), str(big), kernel],
        capture_output=True, text=True, check=True, env=os.environ,
    )  # fmt: skip
    measured: dict[str, float] = json.loads(done.stdout)
    return measured


@pytest.mark.parametrize("kind", ["int8", "float", "fused int8", "fused float", "transposed float"])
def test_peak_memory_is_the_layer_and_about_one_expert(tmp_path: Path, kind: str) -> None:
    """Extra peak <= 1.1 experts + 16 MiB of anonymous memory, for experts of 12 MiB."""
    quantized = kind.endswith("int8")
    hidden, width, experts = 4096, 1024, 4 if quantized else 2
    sizes = {"num_hidden_layers": 1, "hidden_size": hidden}
    stored = tensors(quantized=quantized, layers=1, hidden=hidden, width=width, experts=experts)
    if kind.startswith("transposed"):
        biased = with_biases(stored)
        stored = fuse(biased, transposed=True, interleaved=True, experts=experts)
        configuration = model_config("gpt_oss", num_local_experts=experts, intermediate_size=width, **sizes)
    else:
        stored = fuse(stored, experts=experts) if kind.startswith("fused") else stored
        quant = quantization() if quantized else None
        configuration = config(quant=quant, num_experts=experts, moe_intermediate_size=width, **sizes)
    big = write(tmp_path / "big", configuration, stored)
    small = write(tmp_path / "small", config(quant=quantization()), tensors())
    measured = measure(small, big, "reference.torch")
    expert = 3 * hidden * width
    assert measured["held"] >= experts * expert
    assert measured["extra"] <= 1.1 * expert + (16 << 20), measured


LAYERS, EXPERTS, HIDDEN, WIDTH = 4, 112, 2048, 768  # 2.1 GB of int8


def write_large(folder: Path) -> Path:
    """A checkpoint of four shards, a layer each, written piece by piece."""
    sizes = {"num_hidden_layers": LAYERS, "num_experts": EXPERTS, "moe_intermediate_size": WIDTH}
    write(folder, config(quant=quantization(), hidden_size=HIDDEN, **sizes), None)
    values = torch.randint(0, 256, (HIDDEN * WIDTH,), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))
    weight = bytes(values.untyped_storage())
    for layer in range(LAYERS):
        header, parts, end = {}, [], 0
        for expert in range(EXPERTS):
            for name, rows, columns in (("gate", WIDTH, HIDDEN), ("up", WIDTH, HIDDEN), ("down", HIDDEN, WIDTH)):
                key = f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight"
                scale = struct.pack("<f", 0.01 + expert / 1000) * rows
                for tensor, dtype, shape, part in (
                    (key, "I8", [rows, columns], weight),
                    (f"{key}_scale", "F32", [rows, 1], scale),
                ):
                    header[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(part)]}
                    parts.append(part)
                    end += len(part)
        raw = json.dumps(header).encode()
        with (folder / f"model-{layer + 1:05d}-of-{LAYERS:05d}.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(raw)) + raw)
            file.writelines(parts)
    return folder


def available_memory() -> int:
    with Path("/proc/meminfo").open() as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


@pytest.mark.slow
@pytest.mark.skipif(available_memory() < 4 << 30, reason="needs 4 GiB of free memory")
def test_peak_memory_of_two_gigabytes_on_the_best_kernel(tmp_path: Path) -> None:
    """Packed size + 1.1 experts + 64 MiB of anonymous memory above the baseline."""
    if shutil.disk_usage(tmp_path).free < 4 << 30:
        pytest.skip("needs 4 GiB of free disk space")
    small = write(tmp_path / "small", config(quant=quantization()), tensors())
    big = write_large(tmp_path / "big")
    try:
        measured = measure(small, big, "")
    finally:
        shutil.rmtree(big)
    expert = 3 * HIDDEN * WIDTH
    print(measured)
    assert measured["held"] >= LAYERS * EXPERTS * expert
    assert measured["extra"] <= 1.1 * expert + (64 << 20), measured
