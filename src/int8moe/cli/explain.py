"""``int8moe explain``: which kernel would serve a layer, and why no other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .output import Verb, host_line, say, write, write_json, write_table
from .signals import import_torch

if TYPE_CHECKING:
    from ..contracts import MoEConfig, SelectionReport


@click.command("explain", cls=Verb)
@click.option("--config", "config_text", metavar="JSON|@FILE", help="Fields of MoEConfig as a JSON object.")
@click.option("--checkpoint", metavar="DIR", help="Take the layers of a checkpoint instead.")
@click.option("--kernel", metavar="NAME", help="Ask for this kernel and no other.")
@click.option("--device", default="cpu", show_default=True, help="torch device.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(config_text: str | None, checkpoint: str | None, kernel: str | None, device: str, as_json: bool) -> int:
    """Say which kernel would serve a layer, which ones it beat, and why each other candidate is refused.

    \b
    int8moe explain --checkpoint DIR
    int8moe explain --config '{"num_experts": 8, "top_k": 2, "hidden_size": 64, "intermediate_size": 32}'

    Exits with 1 when no kernel can serve the layer, after all reasons.
    """  # noqa: D301 (click's mark for lines that are not to be filled)
    if (config_text is None) == (checkpoint is None):
        raise click.UsageError("Give either --config or --checkpoint")
    unquantized: list[str] = []
    skipped: list[str] = []
    if checkpoint is not None:
        layers, unquantized, skipped = _layers_of(checkpoint)
    else:
        layers = [(_read_config(config_text or ""), ())]
    answers = [_explain(config, names, kernel, device) for config, names in layers]
    if as_json:
        from ..registry import hints

        first = {"schema": 1, "checkpoint": checkpoint, "unquantized": unquantized, "skipped": skipped, **answers[0]}
        write_json({**first, "hints": hints(), "other_configs": answers[1:]})
    else:
        _write(answers)
        if unquantized:
            write(f"left unquantised by the checkpoint, and served only with --quantize: {', '.join(unquantized)}")
        if skipped:
            write(f"outside the model's layers, and skipped: {', '.join(skipped)}")
    return int(any(answer["chosen"] is None for answer in answers))


def _read_config(text: str) -> MoEConfig:
    from ..contracts import MoEConfig
    from ..errors import ConfigError

    file = Path(text[1:]) if text.startswith("@") else None
    try:
        fields = json.loads(text if file is None else file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        if file is not None:
            raise ConfigError(f"{file}: is not JSON: {error}") from None
        raise click.BadParameter(f"is not JSON: {error}", param_hint="'--config'") from None
    if not isinstance(fields, dict):
        if file is not None:
            raise ConfigError(f"{file}: holds {type(fields).__name__}, wanted is an object of MoEConfig fields")
        raise click.BadParameter("wanted is an object of MoEConfig fields", param_hint="'--config'")
    return MoEConfig(**fields)


def _layers_of(checkpoint: str) -> tuple[list[tuple[MoEConfig, tuple[str, ...]]], list[str], list[str]]:
    """The distinct configs of a checkpoint's MoE layers, each with its layers; the unquantised ones; those skipped."""
    from ..checkpoint import inspect_checkpoint

    grouped: dict[MoEConfig, list[str]] = {}
    plan = inspect_checkpoint(checkpoint)
    for layer in plan.layers:
        grouped.setdefault(layer.config, []).append(layer.key)
    unquantized = [layer.key for layer in plan.layers if not layer.quantized]
    layers = [(config, tuple(names)) for config, names in grouped.items()]
    return layers, unquantized, [skipped.name for skipped in plan.skipped]


def _explain(config: MoEConfig, layers: tuple[str, ...], kernel: str | None, device: str) -> dict[str, Any]:
    from ..errors import NoKernelError, PluginLoadError
    from ..registry import get_registry

    report: SelectionReport | None
    error = None
    try:
        if kernel is not None:
            get_registry().find(kernel)  # an unknown name is an error before torch is imported
        import_torch()
        from ..binding import select_kernel

        report = select_kernel(config, kernel=kernel, device=device)
    except (NoKernelError, PluginLoadError) as refused:
        from .app import error_line

        error = error_line(refused)
        report = getattr(refused, "report", None)
    return {
        "layers": list(layers),
        "config": config.model_dump(mode="json"),
        "chosen": (report.chosen or None) if report else None,
        "pinned": report.pinned if report else None,
        "rejected": [row._asdict() for row in report.rejected] if report else [],
        "outranked": list(report.outranked) if report else [],
        "error": error,
    }


def _write(answers: list[dict[str, Any]]) -> None:
    from ..listing import list_kernels
    from ..registry import hints

    known = {row.name: row for row in list_kernels()}
    write(f"machine: {host_line()}")
    for answer in answers:
        write("")
        if names := answer["layers"]:
            write(f"layers: {names[0] if len(names) == 1 else f'{names[0]} to {names[-1]} ({len(names)})'}")
        write(f"config: {', '.join(f'{key} {value}' for key, value in _stated(answer['config']).items())}")
        rows: list[tuple[object, ...]] = []
        if answer["chosen"] is not None:
            how = f"named by {answer['pinned']}" if answer["pinned"] else "highest priority of those usable"
            rows.append((answer["chosen"], "chosen", _distribution(known, answer["chosen"]), how))
        for name in answer["outranked"]:
            rows.append((name, "outranked", _distribution(known, name), "usable, lower priority"))
        for row in answer["rejected"]:
            rows.append((row["name"], "rejected", row["distribution"], row["reason"]))
        if rows:
            write_table(("kernel", "verdict", "distribution", "reason"), rows)
    if advice := hints():
        write("\n" + "\n".join(f"hint: {line}" for line in advice))
    for answer in answers:
        if answer["chosen"] is None:
            say(f"error: {_summary(answer)}")


def _distribution(known: dict[str, Any], name: str) -> str:
    return str(known[name].distribution) if name in known else ""


def _stated(config: dict[str, Any]) -> dict[str, Any]:
    """The fields that tell one config from another: sizes, activation, and what is not the default."""
    from ..contracts import MoEConfig

    fields = MoEConfig.model_fields
    return {
        name: value
        for name, value in config.items()
        if fields[name].is_required() or name == "activation" or value != fields[name].default
    }


def _summary(answer: dict[str, Any]) -> str:
    if answer["rejected"]:
        return "no kernel can serve this layer; every candidate's reason stands in the table"
    return str(answer["error"])
