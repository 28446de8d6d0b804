"""Time of one MoE layer against the memory roofline of the same run."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

import int8moe
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
    "olmoe": Shape(64, 8, 2048, 1024),
    "smoke": Shape(16, 2, 256, 128),
}


def make_layer(shape: Shape, kernel: str | None, seed: int) -> int8moe.FusedMoE:
    """A layer of random int8 weights; what they hold does not change the time."""
    generator = torch.Generator().manual_seed(seed)
    config = int8moe.MoEConfig(**shape._asdict(), hidden_dtype="bfloat16")
    layer = int8moe.FusedMoE(config, kernel=kernel)
    hidden, inner = shape.hidden_size, shape.intermediate_size
    for expert in range(shape.num_experts):
        layer.load_expert_weights(
            expert,
            w13_weight=torch.randint(-128, 128, (2 * inner, hidden), generator=generator, dtype=torch.int8),
            w13_weight_scale=0.01,
            w2_weight=torch.randint(-128, 128, (hidden, inner), generator=generator, dtype=torch.int8),
            w2_weight_scale=0.01,
        )
    layer.process_weights_after_loading()
    return layer


def calls(shape: Shape, tokens: int, count: int) -> list[tuple[torch.Tensor, ...]]:
    """Inputs of ``count`` calls; experts are dealt so that neighbouring calls share few."""
    generator = torch.Generator().manual_seed(tokens)
    deck = torch.randperm(shape.num_experts, generator=generator).tolist()
    inputs = []
    for _ in range(count):
        rows = []
        for _ in range(tokens):
            if len(deck) < shape.top_k:
                deck = torch.randperm(shape.num_experts, generator=generator).tolist()
            rows.append([deck.pop() for _ in range(shape.top_k)])
        x = torch.randn(tokens, shape.hidden_size, generator=generator).bfloat16()
        inputs.append((x, torch.full((tokens, shape.top_k), 1 / shape.top_k), torch.tensor(rows, dtype=torch.int32)))
    return inputs


def measure(
    layers: list[int8moe.FusedMoE], shape: Shape, tokens: int, buffer: torch.Tensor, rounds: int
) -> dict[str, Any]:
    """Alternate calls of the layer with reads of the bytes that they touch."""
    inputs = calls(shape, tokens, rounds)
    expert_bytes = 3 * shape.hidden_size * shape.intermediate_size
    times, reads, touched_bytes = [], [], []
    position = 0
    words = buffer.view(torch.int64)
    for turn, (x, weights, ids) in enumerate(inputs):
        touched = len(set(ids.flatten().tolist())) * expert_bytes
        touched_bytes.append(touched)
        layer = layers[turn % len(layers)]
        out = torch.empty_like(x)
        start = time.perf_counter()
        layer(x, weights, ids, out=out)
        times.append(time.perf_counter() - start)
        if position + touched > buffer.numel():
            position = 0
        piece = words[position // 8 : (position + touched) // 8]
        position += touched
        start = time.perf_counter()
        piece.sum()
        reads.append(time.perf_counter() - start)
    warm = max(1, rounds // 10)
    time_median, read_median = statistics.median(times[warm:]), statistics.median(reads[warm:])
    touched = statistics.median(touched_bytes[warm:])
    return {
        "tokens": tokens,
        "median_ms": time_median * 1e3,
        "best_ms": min(times[warm:]) * 1e3,
        "gb_per_s": touched / time_median / 1e9,
        "read_median_ms": read_median * 1e3,
        "read_gb_per_s": touched / read_median / 1e9,
        "fraction_of_memory_roofline": read_median / time_median,
        "gmac_per_s": tokens * shape.top_k * expert_bytes / time_median / 1e9,
    }


def write(path: Path, document: Any) -> None:
    """Write beside and rename, so that no half file is left."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        json.dump(document, file, indent=1)
    Path(file.name).replace(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--tokens", default="1,4,16,64", help="comma-separated M")
    parser.add_argument("--kernel", default=None)
    parser.add_argument("--threads", type=int, default=None, help="torch's threads")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument(
        "--gigabytes", type=float, default=2.0, help="weights to rotate over, and size of the read buffer"
    )
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--smoke", action="store_true", help="a tiny shape, seconds")
    options = parser.parse_args()
    if options.smoke:
        options.shape, options.rounds, options.gigabytes, options.tokens = "smoke", 10, 0.01, "1,16"
    if options.threads:
        torch.set_num_threads(options.threads)
    shape = SHAPES[options.shape]
    layer_bytes = 3 * shape.num_experts * shape.hidden_size * shape.intermediate_size
    count = max(1, round(options.gigabytes * 1e9 / layer_bytes))
    layers = [make_layer(shape, options.kernel, seed) for seed in range(count)]
    buffer = allocate_bytes(max(int(options.gigabytes * 1e9), layer_bytes) // 8 * 8, torch.device("cpu")).zero_()
    host = this_host()
    document: dict[str, Any] = {
        "shape": options.shape,
        "kernel": layers[0].kernel.name,
        "layers": count,
        "threads": min(torch.get_num_threads(), host.num_threads),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}",
        "torch": torch.__version__,
        "points": [],
    }
    print(f"{document['kernel']}, {options.shape}, {document['threads']} threads, {document['machine']}")
    print(f"{'M':>6} {'median ms':>10} {'best ms':>9} {'GB/s':>7} {'read GB/s':>10} {'of roofline':>12} {'GMAC/s':>8}")
    for tokens in map(int, options.tokens.split(",")):
        rounds = options.rounds if tokens < 256 else max(8, options.rounds // 6)
        point = measure(layers, shape, tokens, buffer, rounds)
        document["points"].append(point)
        print(
            f"{tokens:>6} {point['median_ms']:>10.3f} {point['best_ms']:>9.3f} {point['gb_per_s']:>7.1f} "
            f"{point['read_gb_per_s']:>10.1f} {point['fraction_of_memory_roofline']:>12.2f} {point['gmac_per_s']:>8.1f}"
        )
    if options.json:
        write(options.json, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
