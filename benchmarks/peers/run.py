"""The same MoE layer on int8moe and on peers that are installed in other environments, in turns, as ratios.

    PEERS_DIR=~/peers python benchmarks/peers/run.py --m 1,16,256

README.md beside this file says how the environments are made and how to read the tables.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from entrants import NoRun, Plan, Refused, choose, known_peers, load, refuse_too_much_memory
from int8moe.benchmark.shapes import SHAPES, parse_shape
from int8moe.cli.output_file import check_writable, replace_file
from int8moe.cli.signals import sigterm_unwinds
from int8moe.host import this_host
from peer import ADAPTERS
from report import Steps, document, heading, machine, say, show
from rounds import Entrant, Point, measure
from shapes import Shape


def _shape(context: click.Context, parameter: click.Parameter, value: str) -> Shape:
    try:
        found = parse_shape(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    sizes = Shape(found.num_experts, found.top_k, found.hidden_size, found.intermediate_size)
    if found.activation != "silu" or found.has_bias:
        what = f"{found.activation}{' and biases' if found.has_bias else ''}"
        raise click.BadParameter(
            f"{value} has {what}, and peers are compared with silu and without biases: "
            f"give its sizes alone, {','.join(map(str, sizes))}"
        )
    return sizes


def _tokens(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    words = [word.strip() for word in value.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise click.BadParameter(f"{value!r} is no list of token counts: give numbers from 1, as in 1,16,256")
    return tuple(dict.fromkeys(map(int, words)))


def _names(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    return None if value is None else tuple(word.strip() for word in value.split(","))


def _interpreters(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, Path]:
    named = {}
    for value in values:
        name, equals, path = value.partition("=")
        if not (name and equals and path):
            raise click.BadParameter(f"{value!r} is not NAME=PATH, as in torch=/path/to/bin/python")
        named[name] = Path(path).expanduser()
    return named


_NAMES = [name for name, shape in SHAPES.items() if shape.activation == "silu" and not shape.has_bias]
_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
_FILE = click.Path(dir_okay=False, path_type=Path)
_MORE_THAN_0 = click.FloatRange(0, min_open=True)


@click.command
@click.option(
    "--shape",
    callback=_shape,
    metavar="NAME | E,K,H,I",
    default="qwen3-30b-a3b",
    show_default=True,
    help=f"The layer: {', '.join(_NAMES)}, or experts, top_k, hidden and intermediate size.",
)
@click.option(
    "--m",
    "tokens",
    callback=_tokens,
    metavar="LIST",
    default="1,16,64,256",
    show_default=True,
    help="Tokens of a call.",
)
@click.option("--threads", type=click.IntRange(1), help="Threads of each peer; by default as many as int8moe uses.")
@click.option("--rounds", type=click.IntRange(7), default=9, show_default=True, help="Turns of each peer.")
@click.option("--seconds", type=click.FloatRange(0), default=0.5, show_default=True, help="Least length of a turn.")
@click.option("--peers", "names", callback=_names, metavar="LIST", help="Which; by default all. int8moe always is.")
@click.option("--check", type=click.IntRange(0), default=16, show_default=True, help="Tokens of the check; 0: none.")
@click.option("--gigabytes", type=_MORE_THAN_0, default=1.2, show_default=True, help="Int8 weights to walk over.")
@click.option(
    "--python", callback=_interpreters, metavar="NAME=PATH", multiple=True, help="Interpreter of an environment."
)
@click.option("--adapters", "folders", type=_FOLDER, multiple=True, help="A folder with peers of your own.")
@click.option(
    "--tolerance",
    type=click.FloatRange(0),
    default=5.0,
    show_default=True,
    help="Percent by which int8moe may differ from itself before ratios are void.",
)
@click.option("--limit", type=_MORE_THAN_0, default=600.0, show_default=True, help="Seconds that an answer may take.")
@click.option("--json", "json_path", type=_FILE, help="Write all figures there.")
@click.option("--smoke", is_flag=True, help="A tiny layer for seconds; does it run at all? Its times mean nothing.")
def command(
    shape: Shape,
    tokens: tuple[int, ...],
    threads: int | None,
    rounds: int,
    seconds: float,
    names: tuple[str, ...] | None,
    check: int,
    gigabytes: float,
    python: dict[str, Path],
    folders: tuple[Path, ...],
    tolerance: float,
    limit: float,
    json_path: Path | None,
    smoke: bool,
) -> int:
    """Time one MoE layer on int8moe and on its peers, in turns; print ratios."""
    if json_path is not None:
        check_writable(json_path, "--json")
    if smoke:
        shape, tokens, rounds, seconds, gigabytes, check = Shape(16, 2, 256, 128), (1, 4), 7, 0.01, 0.002, 4
        names = names or ("torch-grouped-bf16",)
    known = known_peers((ADAPTERS, *folders))
    try:
        candidates = choose(known if names is None else names, known)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="'--peers'") from None
    environments = sorted({candidate.peer.environment for candidate in known.values()})
    for name in python:
        if name not in environments:
            text = f"there is no environment {name!r}: they are {', '.join(environments)}"
            raise click.BadParameter(text, param_hint="'--python'")
    plan = Plan(
        shape=shape,
        tokens=tokens,
        threads=threads or this_host().num_threads,
        rounds=rounds,
        seconds=seconds,
        layers=max(1, round(gigabytes * 1e9 / shape.weights)),
        check=check,
        tolerance=tolerance,
        limit=limit,
        interpreters=python,
    )
    refuse_too_much_memory(plan, candidates)
    about = machine()
    click.echo(heading(plan, about))
    entrants: list[Entrant] = []
    refused: list[Refused] = []
    points: list[Point] = []
    try:
        with sigterm_unwinds(), Steps(len(candidates) * (1 + rounds * len(tokens))) as steps:
            load(plan, candidates, entrants, refused, steps.stage, steps.advance)
            for count in tokens:
                steps.stage(f"M = {count}")
                points.append(measure(entrants, count, rounds, seconds, tolerance, steps.advance))
    finally:
        for entrant in entrants:
            entrant.process.end()
    if json_path is not None:
        figures = document(plan, about, entrants, refused, points)
        replace_file(json_path, (json.dumps(figures, indent=1, allow_nan=False) + "\n").encode())
    show(entrants, refused, points)
    findings = [*_without_figures(names or (), refused, points), *([] if smoke else _void(tolerance, points))]
    for finding in findings:
        say(finding)
    return int(bool(findings))


def _without_figures(wanted: Sequence[str], refused: list[Refused], points: list[Point]) -> list[str]:
    """A peer that was asked for by name and has no figures makes the run fail."""
    missing = [(row.peer, row.reason) for row in refused]
    missing += [(row.peer, f"M = {point.tokens}: {row.reason}") for point in points for row in point.rows if row.reason]
    return [f"{name} was asked for and has no figures: {reason}" for name, reason in missing if name in wanted]


def _void(tolerance: float, points: list[Point]) -> list[str]:
    return [
        f"M = {point.tokens} is void: int8moe against itself {point.control}, {tolerance:g} % is allowed; run again "
        "when the machine is quieter, or with more --rounds or --seconds"
        for point in points
        if point.void
    ]


def main(arguments: list[str]) -> int:
    """Run one command line.

    Returns:
        The exit status: 0, 1 for a finding or an error, 2 for wrong usage, 130 when interrupted.
    """
    try:
        status = command.main(arguments, prog_name="run.py", standalone_mode=False)
        return status if isinstance(status, int) else 0
    except click.ClickException as error:
        say(f"error: {error.format_message()}")
        return error.exit_code
    except (NoRun, OSError) as error:
        say(f"error: {error}")
        return 1
    except (KeyboardInterrupt, click.Abort):
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
