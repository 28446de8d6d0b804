"""``int8moe new-plugin``: writes a kernel plugin that builds, is found and passes, to be made one's own."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from .output import Verb, write, write_json
from .signals import sigterm_unwinds


@click.command("new-plugin", cls=Verb)
@click.argument("namespace")
@click.option(
    "--isa",
    "isas",
    required=True,
    multiple=True,
    metavar="NAME",
    help="A CPU feature as /proc/cpuinfo spells it, or any.",
)
@click.option("--native", is_flag=True, help="A kernel in C++ on the driver of int8moe, not in plain torch.")
@click.option("--foreign", is_flag=True, help="Take a feature that this machine's CPU does not have.")
@click.option("--output", metavar="DIR", help="The folder to make; without it ./NAMESPACE, with dashes.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(
    namespace: str, isas: tuple[str, ...], native: bool, foreign: bool, output: str | None, as_json: bool
) -> int:
    """Write the distribution of a kernel plugin, for the kernels NAMESPACE.*.

    As it is written it can be installed and passes `int8moe verify`: plain torch, or with --native a scalar kernel in
    C++. Then put your own in its place, a piece at a time. docs/write-a-kernel-plugin.md walks through it.
    """
    from ..errors import ConfigError
    from ..scaffold import PluginNames, check_isa, check_namespace, write_plugin

    hint = "'NAMESPACE'"
    try:
        check_namespace(namespace)
        hint = "'--isa'"
        isa = check_isa(_only(isas), foreign=foreign)
        names = PluginNames(namespace, isa, native)
        folder = Path(names.dashed if output is None else output)
        hint = "'--output'"
        with sigterm_unwinds():
            made = write_plugin(names, folder)
    except ConfigError as error:
        raise click.BadParameter(str(error), param_hint=hint) from None
    place = str(folder) if folder.is_absolute() else f"./{folder.as_posix()}"
    commands = [
        f"python -m pip install -e {shlex.quote(place)}",
        "int8moe list-kernels --check",
        f"int8moe verify {names.kernel} --quick",
    ]
    if as_json:
        write_json(
            {
                "schema": 1,
                "path": str(folder.absolute()),
                "distribution": names.distribution,
                "kernel": names.kernel,
                "layout": names.layout,
                "files": list(made.files),
                "next": commands,
            }
        )
        return 0
    own = [name for name in made.files if not name.startswith("include/")]
    write(f"{place}: {names.distribution} with the kernel {names.kernel}, layout {names.layout}\n")
    for name in own:
        write(f"  {name}")
    if len(own) < len(made.files):
        write(f"  include/int8moe/*.h (the driver, {len(made.files) - len(own)} files)")
    write("\nnext:")
    for line in commands:
        write(f"  {line}")
    return 0


def _only(isas: tuple[str, ...]) -> str:
    """The one feature that the kernel is called after."""
    from ..errors import ConfigError

    if len(isas) > 1:
        raise ConfigError(
            f"given {len(isas)} times ({', '.join(isas)}): a kernel is called after one feature; give that, and add "
            "the others to `isa` in the plugin.py that is written"
        )
    return isas[0]
