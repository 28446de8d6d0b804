"""``int8moe pack``: fills the packed cache."""

from __future__ import annotations

import time
from pathlib import Path

import click

from .output import Verb, host_line, write, write_json, write_table
from .output_file import try_folder
from .run import cache_dir_option, human_seconds, layer_numbers
from .signals import import_torch

_STATES = {"read": "up to date", "written": "written"}


def _check_folder(cache_dir: str | None) -> None:
    """Refuse a cache that cannot be written to before a layer is packed for it."""
    from ..cache_folder import default_cache_directory, why_unwritable
    from ..errors import CheckpointError

    folder = default_cache_directory() if cache_dir is None else Path(cache_dir)
    try:
        try_folder(folder)
    except OSError as error:
        raise CheckpointError(f"packed cache {folder} cannot be written: {why_unwritable(error)}") from None


@click.command("pack", cls=Verb)
@click.argument("checkpoint")
@click.option("--kernel", metavar="NAME", help="Pack for this kernel and no other.")
@click.option("--layers", callback=layer_numbers, metavar="0,1|0-3", help="Only these layers.")
@click.option("--quantize", is_flag=True, help="Quantise the layers that the checkpoint leaves unquantised.")
@cache_dir_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(
    checkpoint: str,
    kernel: str | None,
    layers: list[int] | None,
    quantize: bool,
    cache_dir: str | None,
    as_json: bool,
) -> int:
    """Pack the MoE layers of a checkpoint and keep them on disk: later loads read them, and pack nothing.

    A layer is packed again when its source files, its layout or the numerics have changed, or when its file is
    damaged; what is up to date is checked and left alone. Several processes may do this at once.
    """
    from .sources import open_source

    source = open_source(checkpoint, layers=layers, quantize=quantize)
    if kernel is not None:
        from ..registry import get_registry

        get_registry().find(kernel)  # an unknown name is an error before torch is imported
    _check_folder(cache_dir)
    import_torch()
    from ..checkpoint import PackedCache
    from .progress import WeightProgress, human_bytes

    cache = PackedCache(cache_dir, required=True)
    started = time.perf_counter()
    rows = []
    with WeightProgress(sum(layer.nbytes for layer in source.chosen)) as progress:
        for layer in source.layers(0, cache):
            progress.begin(layer.name)
            loaded = layer.load(kernel, progress.advance)
            progress.end(cached=loaded.cache == "read")
            layout = loaded.layer.weight_layout
            rows.append((layer, loaded.layer.kernel.name, "" if layout is None else layout.tag))
            del loaded  # one layer in memory at a time
    seconds = time.perf_counter() - started
    outcomes = {layer.name: cache.outcomes.get(layer.name) for layer, _, _ in rows}
    if as_json:
        write_json(
            {
                "schema": 1,
                "checkpoint": checkpoint,
                "cache": str(cache.directory),
                "layers": [
                    {
                        "layer": layer.name,
                        "kernel": name,
                        "layout": layout,
                        "state": "not cached" if (outcome := outcomes[layer.name]) is None else _STATES[outcome.state],
                        "file": None if outcome is None else str(outcome.file),
                        "nbytes": 0 if outcome is None else outcome.nbytes,
                    }
                    for layer, name, layout in rows
                ],
                "unquantized": [{"layer": layer.key, "dtype": layer.dtype} for layer in source.unquantized],
            }
        )
        return 0
    write(f"checkpoint: {source.title}")
    write(f"machine:    {host_line()}")
    write(f"cache:      {cache.directory}\n")
    table = [
        (
            layer.name,
            name,
            layout,
            "" if (outcome := outcomes[layer.name]) is None else human_bytes(outcome.nbytes),
            "not cached" if outcome is None else _STATES[outcome.state],
        )
        for layer, name, layout in rows
    ]
    write_table(("layer", "kernel", "layout", "packed", "state"), table, right=("packed",))
    for unquantized in source.unquantized:
        write(f"{unquantized.key}: unquantised ({unquantized.dtype}), not packed; --quantize quantises it")
    written = sum(outcome is not None and outcome.state == "written" for outcome in outcomes.values())
    write(f"\n{written} of {len(rows)} layers written in {human_seconds(seconds)}, the others were up to date")
    return 0
