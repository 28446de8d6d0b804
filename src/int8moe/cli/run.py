"""``int8moe run``: the main job, layer by layer, on a real checkpoint."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from .output import Verb, host_line, say, write, write_json, write_table
from .signals import import_torch

if TYPE_CHECKING:
    from .layer_run import LayerRun
    from .sources import Source


def layer_numbers(ctx: click.Context, parameter: click.Parameter, value: str | None) -> list[int] | None:
    """``0,2,5`` or ``0-3`` as numbers."""
    if value is None:
        return None
    numbers: set[int] = set()
    for word in value.split(","):
        first, dash, last = word.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or int(last or first) - int(first) > 10_000:
            raise click.BadParameter(f"{word.strip()!r} is not a layer number or a range such as 0-3")
        numbers.update(range(int(first), int(last or first) + 1))
    return sorted(numbers)


cache_dir_option = click.option(
    "--cache-dir",
    metavar="DIR",
    type=click.Path(file_okay=False),
    help="Folder of packed layers. [default: INT8MOE_CACHE_DIR, else the user's cache folder]",
)


@click.command("run", cls=Verb)
@click.argument("checkpoint", metavar="[CHECKPOINT]", required=False)
@click.option("--kernel", metavar="NAME", help="Use this kernel and no other.")
@click.option("--layers", callback=layer_numbers, metavar="0,1|0-3", help="Only these layers.")
@click.option("--tokens", type=click.IntRange(1, 65_536), default=64, show_default=True, help="Tokens of the prefill.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Of the hidden states.")
@click.option("--quantize", is_flag=True, help="Quantise the layers that the checkpoint leaves unquantised.")
@cache_dir_option
@click.option("--no-cache", is_flag=True, help="Do not look for packed layers.")
@click.option("--mmap", is_flag=True, help="Map packed layers instead of reading them.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(
    checkpoint: str | None,
    kernel: str | None,
    layers: list[int] | None,
    tokens: int,
    seed: int,
    quantize: bool,
    cache_dir: str | None,
    no_cache: bool,
    mmap: bool,
    as_json: bool,
) -> int:
    """Load, pack and run the MoE layers of a checkpoint, one after another.

    Each layer runs on seeded hidden states through the checkpoint's own router; a sample of its tokens is
    compared, bit for bit, with the reference on weights that are read from the checkpoint again. Layers that the
    checkpoint leaves unquantised, and those outside the model, are named.

    Layers that `int8moe pack` has packed are read from the packed cache; one that no longer fits is reported,
    and written again.

    Without CHECKPOINT it takes examples/tiny-qwen3-moe-w8a8 of a checkout, or a layer made in memory.
    Exits with 1 when a layer's bits differ.
    """
    from .sources import open_source

    if no_cache and (mmap or cache_dir is not None):
        raise click.UsageError("--no-cache excludes --mmap and --cache-dir")
    source = open_source(checkpoint, layers=layers, quantize=quantize)
    if kernel is not None:
        from ..registry import get_registry

        get_registry().find(kernel)  # an unknown name is an error before torch is imported
    import_torch()
    from ..binding import select_kernel
    from ..checkpoint import PackedCache
    from .layer_run import run_layer
    from .progress import WeightProgress

    report = select_kernel(source.config, kernel=kernel)
    if not as_json:
        write(f"checkpoint: {source.title}")
        write(f"machine:    {host_line()}")
        how = f"named by {report.pinned}" if report.pinned else "the best of those usable"
        write(f"kernel:     {report.chosen} ({how})\n")
    found = source.layers(seed, None if no_cache else PackedCache(cache_dir, create=False, mmap=mmap))
    with WeightProgress(sum(layer.nbytes for layer in found)) as progress:
        runs = [run_layer(layer, kernel=kernel, tokens=tokens, seed=seed, progress=progress) for layer in found]
    equal = all(run.as_declared for run in runs)
    if as_json:
        write_json(
            {
                "schema": 1,
                "checkpoint": None if source.plan is None else str(source.plan.path),
                "source": source.title,
                "tokens": tokens,
                "seed": seed,
                "passed": equal,
                "layers": [asdict(run) for run in runs],
                "unquantized": [{"layer": layer.key, "dtype": layer.dtype} for layer in source.unquantized],
                "quantized_on_load": [{"layer": layer.key, "dtype": layer.dtype} for layer in source.quantized_on_load],
                "skipped": [
                    {"layer": layer.name, "tensors": layer.num_tensors, "bytes": layer.nbytes}
                    for layer in source.skipped
                ],
            }
        )
    else:
        _write(source, runs, tokens)
    for run in runs:
        if not run.as_declared:
            say(f"error: {run.layer}: kernel {run.kernel!r} differs from the reference: {run.difference}")
    return int(not equal)


def _write(source: Source, runs: list[LayerRun], tokens: int) -> None:
    from .progress import human_bytes

    prefill = f"prefill ({tokens})"
    columns = ("layer", "kernel", "weights", "pack time", "peak memory", "decode (1)", prefill, "bits equal")
    rows = [
        (
            run.layer,
            run.kernel,
            human_bytes(run.source_bytes),
            "cached" if run.cache == "read" else human_seconds(run.pack_seconds),
            f"+{human_bytes(run.peak_bytes)}",
            human_seconds(run.decode_seconds),
            human_seconds(run.prefill_seconds),
            "yes" if run.bits_equal else "within tolerance" if run.as_declared else "NO",
        )
        for run in runs
    ]
    write_table(columns, rows, right=columns[2:7])
    for layer in source.unquantized:
        write(f"{layer.key}: unquantised ({layer.dtype}), not run; --quantize quantises it")
    for layer in source.quantized_on_load:
        write(f"{layer.key}: stored unquantised ({layer.dtype}), quantised while loading")
    for skipped in source.skipped:
        size = f"{skipped.num_tensors} expert tensors, {human_bytes(skipped.nbytes)}"
        write(f"{skipped.name}: outside the model's layers (multi-token prediction), skipped ({size})")
    equal = sum(run.bits_equal for run in runs)
    compared = sum(run.compared_tokens for run in runs)
    write(f"\nbits equal in {equal} of {len(runs)} layers ({compared} tokens compared with the reference)")


def human_seconds(seconds: float) -> str:
    """Three digits and a unit."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * scale >= 1 or unit == "us":
            value = seconds * scale
            return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"
    raise AssertionError
