"""``int8moe bench``: the time of one MoE layer against the roofline of the same run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click

from ..benchmark.request import FEWEST_ROUNDS, ROUTINGS, Request
from ..benchmark.shapes import NUMBERS, SHAPES, parse_shape
from .number import Number
from .output import Verb, say, write, write_json
from .output_file import check_writable, replace_file
from .signals import import_torch

_MOST_TOKENS = 65_536
_MOST_POINTS = 256
_PLOT_FORMATS = (".svg", ".png")


def token_counts(ctx: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    """``1,4,16`` or ``1-8`` as numbers, each once, in ascending order."""
    counts: set[int] = set()
    for word in value.split(","):
        first, dash, last = word.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise click.BadParameter(f"{word.strip()!r} is not a number of tokens or a range such as 1-8")
        low, high = int(first), int(last or first)
        if not 1 <= low <= high <= _MOST_TOKENS:
            raise click.BadParameter(f"{word.strip()!r}: give 1 to {_MOST_TOKENS} tokens, the smaller number first")
        counts.update(range(low, min(high, low + _MOST_POINTS) + 1))
    if len(counts) > _MOST_POINTS:
        raise click.BadParameter(f"{value!r} names more than {_MOST_POINTS} points; give fewer")
    return tuple(sorted(counts))


def _one_of_the_contract(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """A dtype or an activation; their lists are in the contracts, which --help does not import."""
    from ..contracts import ACTIVATIONS, HIDDEN_DTYPES

    allowed = HIDDEN_DTYPES if parameter.name == "dtype" else ACTIVATIONS
    if value is not None and value not in allowed:
        raise click.BadParameter(f"{value!r} is none of {', '.join(allowed)}")
    return value


def _thread_count(ctx: click.Context, parameter: click.Parameter, value: int | None) -> int | None:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    if value is not None and not 1 <= value <= usable:
        raise click.BadParameter(f"{value}: this process may use {usable} CPUs; give 1 to {usable}")
    return value


def _plot_file(ctx: click.Context, parameter: click.Parameter, value: str | None) -> Path | None:
    if value is None:
        return None
    path = Path(value)
    if path.suffix.lower() not in _PLOT_FORMATS:
        raise click.BadParameter(f"{value}: the name has to end in {' or '.join(_PLOT_FORMATS)}")
    check_writable(path, "--plot")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        from ..diagnosis.mends import with_extra
        from ..errors import Int8MoEError

        raise Int8MoEError(f"--plot needs matplotlib ({error}); {with_extra('plot')}") from None
    return path


def _json_file(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    if value is not None and value != "-":
        check_writable(Path(value), "--json")
    return value


@click.command("bench", cls=Verb)
@click.option("--shape", "shape_name", default="qwen3-30b-a3b", show_default=True, metavar="NAME|E,K,H,I",
              help=f"A model ({', '.join(SHAPES)}), or numbers: {NUMBERS}.")  # fmt: skip
@click.option("--activation", metavar="NAME", callback=_one_of_the_contract, help="Instead of the shape's own.")
@click.option("--num-experts", type=click.IntRange(min=1), metavar="N", help="Only N of the shape's experts.")
@click.option("--tokens", default="1,4,16,64,256", show_default=True, metavar="M,M|M-M", callback=token_counts,
              help="Tokens of a call, one point each.")  # fmt: skip
@click.option("--kernel", "kernels", multiple=True, metavar="NAME",
              help="May be repeated: all are compared with the first. The same twice is a noise check.")  # fmt: skip
@click.option("--threads", type=int, metavar="N", callback=_thread_count, help="Default: those that int8moe would use.")
@click.option("--dtype", default="bfloat16", show_default=True, metavar="NAME", callback=_one_of_the_contract,
              help="Of the hidden states.")  # fmt: skip
@click.option("--routing", type=click.Choice(list(ROUTINGS)), default="uniform", show_default=True,
              help="; ".join(f"{name}: {text}" for name, text in ROUTINGS.items()) + ".")  # fmt: skip
@click.option("--rounds", type=click.IntRange(FEWEST_ROUNDS, 1000), default=15, show_default=True,
              help="Least alternations a point.")  # fmt: skip
@click.option("--seconds", type=Number(0, 3600), default=1.0, show_default=True,
              help="A point goes on for at least that long.")  # fmt: skip
@click.option("--gigabytes", type=Number(0, 10_000, min_open=True), default=2.0, show_default=True,
              help="Weights of each kernel to rotate over, so that they come from memory as in a model.")  # fmt: skip
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True,
              help="Of routing and hidden states.")  # fmt: skip
@click.option("--overhead", is_flag=True, help="Also measure what a call on a tiny layer costs.")
@click.option("--json", "json_file", is_flag=False, flag_value="-", metavar="[FILE]", callback=_json_file,
              help="Write one JSON document with all samples; no FILE, or -: print it, and no table.")  # fmt: skip
@click.option("--plot", "plot_file", metavar="FILE.svg|png", callback=_plot_file,
              help="Draw time and fraction of the roofline over M.")  # fmt: skip
def command(
    shape_name: str,
    activation: str | None,
    num_experts: int | None,
    json_file: str | None,
    plot_file: Path | None,
    kernels: tuple[str, ...],
    **options: Any,
) -> int:
    """Time one MoE layer of random weights, and say how far it is from what this machine can do.

    \b
    int8moe bench --shape mixtral-8x7b --tokens 1,16,256
    int8moe bench --kernel NAME --kernel NAME --json out.json     # the same twice: how noisy is the machine?

    The roofline of a call is the larger of reading the weights that it touches and doing its operations. Both limits
    are measured in every round, between the calls. Exits with 1 when a kernel differs from itself by more than 5 %.
    """  # noqa: D301 (click's mark for lines that are not to be filled)
    request = _request(shape_name, activation, num_experts, kernels, options)
    if kernels:
        from ..registry import get_registry

        for name in kernels:
            get_registry().find(name)  # an unknown name is an error before torch is imported
    import_torch()
    document = _measure(request)
    if json_file == "-":
        write_json(document)
    else:
        from .bench_table import write_document

        write_document(document)
    if json_file not in (None, "-"):
        replace_file(Path(json_file or ""), (json.dumps(document, indent=1) + "\n").encode())
        _tell(json_file, "JSON", as_data=True)
    if plot_file is not None:
        from ..benchmark.plot import draw

        replace_file(plot_file, draw(document, plot_file.suffix.lower().lstrip(".")))
        _tell(plot_file, "plot", as_data=json_file != "-")
    if document["void"]:
        say("error: void: A/A differs by more than 5 %; wait for a quieter machine, or give more --rounds")
    return int(document["void"] is True)


def _tell(path: object, what: str, *, as_data: bool) -> None:
    (write if as_data else say)(f"{what}: {path}")


def _request(
    shape_name: str,
    activation: str | None,
    num_experts: int | None,
    kernels: tuple[str, ...],
    options: dict[str, Any],
) -> Request:
    try:
        full = parse_shape(shape_name)
        shape = parse_shape(shape_name, activation=activation, num_experts=num_experts)
    except ValueError as error:
        hint = "'--shape'" if num_experts is None else "'--shape' or '--num-experts'"
        raise click.BadParameter(str(error), param_hint=hint) from None
    return Request(shape_name, shape, full.num_experts, kernels=kernels, **options)


def _measure(request: Request) -> dict[str, Any]:
    from ..benchmark.report import document
    from ..benchmark.run import Benchmark, thread_count
    from .progress import MeasuringProgress, WeightProgress

    with thread_count(request.threads) as threads:
        benchmark = Benchmark(request)
        with WeightProgress(benchmark.weight_bytes) as packing:
            benchmark.load(packing)
        with MeasuringProgress(len(request.tokens)) as measuring:
            results = benchmark.measure(measuring)
        return document(benchmark, results, threads)
