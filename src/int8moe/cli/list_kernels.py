"""``int8moe list-kernels``: every kernel and plugin, and why this machine cannot run some."""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import TYPE_CHECKING, Any

import click

from .output import Verb, flush, host_line, write, write_json, write_table
from .signals import import_torch, signal_text

if TYPE_CHECKING:
    from ..contracts import KernelInfo, PluginInfo


@click.command("list-kernels", cls=Verb)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--check", is_flag=True, help="Load each available kernel: its hooks are checked and it tests itself.")
def command(as_json: bool, check: bool) -> int:
    """Show every kernel and plugin, what this machine can run, and why not the rest.

    Broken plugins are shown with their error and do not make the command fail; a kernel that fails --check does.
    """
    from ..listing import list_kernels, list_plugins
    from ..registry import hints

    kernels, plugins = list_kernels(), list_plugins()
    checks = check_kernels([row.name for row in kernels if row.available]) if check else None
    failed = checks is not None and any(result != "ok" for result in checks.values())
    if as_json:
        write_json(_document(kernels, plugins, checks))
        return int(failed)
    _write_kernels(kernels, checks)
    write("")
    write_table(
        ("plugin", "distribution", "version", "state", "error"),
        [(row.name, row.distribution, row.version, row.state, row.error) for row in plugins],
    )
    write(f"\nmachine: {host_line()}")
    for hint in hints():
        write(f"hint: {hint}")
    return int(failed)


def _document(kernels: list[KernelInfo], plugins: list[PluginInfo], checks: dict[str, str] | None) -> dict[str, Any]:
    rows = [dataclasses.asdict(row) for row in kernels]
    if checks is not None:
        for row in rows:
            row["check"] = checks.get(row["name"], "")
    return {"schema": 1, "kernels": rows, "plugins": [dataclasses.asdict(row) for row in plugins]}


def isa_text(isa: tuple[tuple[str, ...], ...]) -> str:
    """Feature sets for people: ``avx2+fma or asimd``."""
    return " or ".join("+".join(words) for words in isa) or "any"


def _write_kernels(kernels: list[KernelInfo], checks: dict[str, str] | None) -> None:
    columns = ["kernel", "priority", "available", "device", "isa", "layout", "numerics", "distribution", "version"]
    rows: list[list[object]] = [
        [
            row.name,
            row.priority,
            "yes" if row.available else "no",
            row.device,
            isa_text(row.isa),
            row.layout,
            row.numerics.partition(":")[0],  # the reason for a tolerance is in --json
            row.distribution,
            row.version,
        ]
        for row in kernels
    ]
    if checks is None:
        columns.append("reason")
        for kernel, row in zip(kernels, rows, strict=True):
            row.append(kernel.reason)
    else:
        columns.append("check, or reason")
        for kernel, row in zip(kernels, rows, strict=True):
            row.append(checks.get(kernel.name, kernel.reason))
    write_table(columns, rows, right=("priority",))


def check_kernels(names: list[str]) -> dict[str, str]:
    """Bind each kernel: "ok", or why it did not pass.

    Where fork is safe each one does so in a child process, so that an illegal instruction is a finding about
    one kernel and not the end of the command.
    """
    import_torch()  # once, for all children
    return {name: _check_in_child(name) if sys.platform == "linux" else _check(name) for name in names}


def _check(name: str) -> str:
    from ..binding import bind
    from .app import error_line

    try:
        bind(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plugin may end in anything, SystemExit included
        return error_line(error)
    return "ok"


def _check_in_child(name: str) -> str:
    flush()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            with os.fdopen(writer, "w", encoding="utf-8") as pipe:
                pipe.write(_check(name))
            sys.stderr.flush()
        finally:
            os._exit(0)
    os.close(writer)
    try:
        with os.fdopen(reader, encoding="utf-8") as pipe:
            result = pipe.read()
    finally:
        status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return f"its self-test was ended by {signal_text(os.WTERMSIG(status))}"
    return result or "its self-test ended the process"
