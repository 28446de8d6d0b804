"""``int8moe quantize``: an unquantised checkpoint becomes a compressed-tensors W8A8 one."""

from __future__ import annotations

import time

import click

from .output import Verb, write, write_json
from .signals import import_torch


@click.command("quantize", cls=Verb)
@click.argument("source", metavar="SRC")
@click.argument("destination", metavar="DST")
@click.option(
    "--max-shard-size",
    type=click.IntRange(1, 1 << 20),
    default=4096,
    show_default=True,
    metavar="MIB",
    help="Begin a new file before one grows beyond that.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(source: str, destination: str, max_shard_size: int, as_json: bool) -> int:
    """Quantise the experts of SRC, a bf16, fp16 or fp32 MoE checkpoint, into the new directory DST.

    DST is compressed-tensors `int-quantized` W8A8: int8 weights with one scale a row, int8 activations with one
    scale a token. Everything but the routed experts is copied as it is, tokenizer and settings too.

    It is written beside, as DST.partial, and renamed at the end. A run that was stopped goes on where it was when
    the same command is given again.
    """
    from ..checkpoint import inspect_checkpoint
    from ..checkpoint.quantizable import new_directory, refuse_quantized

    new_directory(destination)  # what is wrong is told before torch is imported
    plan = inspect_checkpoint(source)
    refuse_quantized(plan)
    import_torch()
    from ..checkpoint import quantize_checkpoint
    from .progress import WeightProgress, human_bytes
    from .run import human_seconds

    started = time.perf_counter()
    total = sum(layer.nbytes for layer in plan.layers)
    with WeightProgress(total, doing="quantising", done="quantised") as progress:
        shard, read = "", 0

        def note(name: str, done: int, all_bytes: int) -> None:
            nonlocal shard, read
            if name != shard:
                if shard:
                    progress.end()
                progress.begin(name)
                shard = name
            progress.set_total(all_bytes)
            progress.advance(done - read)
            read = done

        result = quantize_checkpoint(source, destination, max_shard_bytes=max_shard_size << 20, progress=note)
        progress.end()
    seconds = time.perf_counter() - started
    if as_json:
        write_json(
            {"schema": 1, "source": source, "destination": destination, **result._asdict(), "path": str(result.path)}
        )
        return 0
    write(f"source:      {source} ({plan.model_type}, {human_bytes(result.source_bytes)})")
    write(f"destination: {destination} (compressed-tensors W8A8, {human_bytes(result.nbytes)})")
    write(f"experts:     {result.num_experts} in {len(result.layers)} layers, quantised; all else is as it was")
    resumed = f", {len(result.resumed)} of them by an earlier run" if result.resumed else ""
    write(f"files:       {len(result.shards)} of weights{resumed}; copied: {', '.join(result.copied) or 'none'}")
    write(f"\nwritten in {human_seconds(seconds)}; int8moe run {destination} loads and checks it")
    return 0
