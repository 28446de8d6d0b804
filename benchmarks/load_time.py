"""Time to load packed layers from the cache, against a plain copy of as many bytes in the same run."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

import int8moe
from int8moe.checkpoint import PackedCache, inspect_checkpoint
from int8moe.host import this_host
from int8moe.storage import allocate_bytes


class Shape(NamedTuple):
    """Sizes of one MoE layer."""

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int


SHAPES = {
    "qwen3-30b-a3b": Shape(128, 8, 2048, 768),
    "mixtral-8x7b": Shape(8, 2, 4096, 14336),
    "smoke": Shape(16, 2, 256, 128),
}


def write_checkpoint(folder: Path, shape: Shape, layers: int) -> Path:
    """A qwen3_moe checkpoint of random int8 experts, one shard a layer."""
    scheme = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**scheme, "strategy": "channel", "dynamic": False},
        "input_activations": {**scheme, "strategy": "token", "dynamic": True},
    }
    config = {
        "model_type": "qwen3_moe",
        "num_experts": shape.num_experts,
        "num_experts_per_tok": shape.top_k,
        "hidden_size": shape.hidden_size,
        "moe_intermediate_size": shape.intermediate_size,
        "num_hidden_layers": layers,
        "hidden_act": "silu",
        "norm_topk_prob": True,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    hidden, inner = shape.hidden_size, shape.intermediate_size
    generator = torch.Generator().manual_seed(1)
    for layer in range(layers):
        tensors = {}
        for expert in range(shape.num_experts):
            for role, size in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
                name = f"model.layers.{layer}.mlp.experts.{expert}.{role}_proj.weight"
                tensors[name] = torch.randint(-128, 128, size, generator=generator, dtype=torch.int8)
                tensors[f"{name}_scale"] = torch.full((size[0], 1), 0.01)
        save_file(tensors, folder / f"model-{layer + 1:05d}-of-{layers:05d}.safetensors")
    return folder


class Seconds(NamedTuple):
    """Time of one call. ``cpu``, of all threads together, suffers less from other work on the machine."""

    wall: float
    cpu: float


def seconds(call: Callable[[], object]) -> Seconds:
    """Time one call, without the release of what it returns."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = call()
    taken = Seconds(time.perf_counter() - wall, time.process_time() - cpu)
    del result
    return taken


def measure(folder: Path, cache_folder: Path, kernel: str | None, rounds: int) -> dict[str, Any]:
    """Alternate loads from the cache, mapped and read, with copies of as many bytes."""
    plan = inspect_checkpoint(folder)
    first = PackedCache(cache_folder)
    packing = seconds(lambda: int8moe.load_moe_layers(plan, kernel=kernel, cache=first))
    nbytes = sum(outcome.nbytes for outcome in first.outcomes.values())
    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    used = allocate_bytes(nbytes, torch.device("cpu")).zero_()

    def load(**options: Any) -> object:
        cache = PackedCache(cache_folder, create=False, **options)
        layers = int8moe.load_moe_layers(plan, kernel=kernel, cache=cache)
        if any(outcome.state != "read" for outcome in cache.outcomes.values()):
            raise SystemExit("error: the cache was not used")
        return layers

    calls: dict[str, Callable[[], object]] = {
        "read": load,
        "mapped": lambda: load(mmap=True),
        "copy_fresh": lambda: allocate_bytes(nbytes, torch.device("cpu")).copy_(source),
        "copy_used": lambda: used.copy_(source),
        "checkpoint": lambda: int8moe.load_moe_layers(plan, kernel=kernel),
    }
    times: dict[str, list[Seconds]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(seconds(call))
    medians = {name: Seconds(*map(statistics.median, zip(*taken, strict=True))) for name, taken in times.items()}
    fresh = zip(times["read"], times["copy_fresh"], strict=True)
    return {
        "packed_bytes": nbytes,
        "load_pack_and_write_seconds": packing.wall,
        "median_seconds": {name: median._asdict() for name, median in medians.items()},
        "read_over_copy": {
            "wall": statistics.median(read.wall / copy.wall for read, copy in fresh),
            "cpu": medians["read"].cpu / medians["copy_fresh"].cpu,
        },
    }


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--kernel", help="default: the best of this machine")
    parser.add_argument("--folder", type=Path, help="where the checkpoint and the cache are written for the run")
    parser.add_argument("--smoke", action="store_true", help="a tiny checkpoint, for seconds")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args()
    shape, rounds = (SHAPES["smoke"], 2) if options.smoke else (SHAPES[options.shape], options.rounds)
    torch.set_num_threads(this_host().num_threads)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        checkpoint, cache = Path(folder, "checkpoint"), Path(folder, "cache")
        checkpoint.mkdir()
        figures = measure(write_checkpoint(checkpoint, shape, options.layers), cache, options.kernel, rounds)
    gib = figures["packed_bytes"] / 2**30
    print(f"packed: {gib:.2f} GiB in {options.layers} layers; medians of {rounds} rounds")
    for name, median in figures["median_seconds"].items():
        wall, cpu = median["wall"], median["cpu"]
        print(f"{name:<12} {wall * 1e3:10.1f} ms  {gib / wall:8.2f} GiB/s  {cpu * 1e3:10.1f} ms of CPU")
    ratio = figures["read_over_copy"]
    print(f"read over copy into fresh memory: {ratio['wall']:.2f} (CPU time {ratio['cpu']:.2f})")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
