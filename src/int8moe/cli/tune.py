"""``int8moe tune``: a kernel measures what is fastest for a layer on this machine; the next process finds it."""

from __future__ import annotations

from pathlib import Path

import click

from ..benchmark.shapes import NUMBERS, SHAPES, parse_shape
from ..cache_folder import DIRECTORY_VARIABLE
from .bench import token_counts
from .output import Verb, say, write, write_json
from .output_file import replace_file, try_folder
from .signals import import_torch


@click.command("tune", cls=Verb)
@click.option("--kernel", required=True, metavar="NAME", help="The kernel that measures.")
@click.option("--shape", "shape_name", default="qwen3-30b-a3b", show_default=True, metavar="NAME|E,K,H,I",
              help=f"A model ({', '.join(SHAPES)}), or numbers: {NUMBERS}.")  # fmt: skip
@click.option("--tokens", default="1,16,64,256,1024,4096", show_default=True, metavar="M,M|M-M", callback=token_counts,
              help="Tokens of a call to measure with.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(kernel: str, shape_name: str, tokens: tuple[int, ...], as_json: bool) -> int:
    """Let a kernel measure what is fastest for a layer on this machine, and keep it for the next process.

    It changes the time of a call and never its bits. What is written lies in the user's cache folder, or in
    INT8MOE_CACHE_DIR.
    """
    from ..errors import Int8MoEError, NoKernelError
    from ..listing import why_not_here
    from ..tuned_files import tuned_folder

    try:
        shape = parse_shape(shape_name)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="'--shape'") from None
    reason = why_not_here(kernel)
    if reason is not None:
        raise NoKernelError(
            f"kernel {kernel!r} cannot be tuned on this machine: {reason}. Run this on the machine that will serve"
        )
    import_torch()
    from ..binding import bind
    from ..contracts import MoEConfig
    from ..host import this_host

    config = MoEConfig(**shape._asdict())
    bound = bind(kernel, config)
    if bound.tune is None:
        raise Int8MoEError(f"kernel {kernel!r} has nothing to tune (it has no tune hook): it runs as it is")
    refused = bound.refusal(config, this_host())
    if refused is not None:
        raise NoKernelError(f"kernel {kernel!r} does not take {shape_name}: {refused}. Give another --shape")
    folder = tuned_folder(bound.spec.namespace)
    _check_writable(folder)
    files = bound.tune(config, tokens, say)
    written = _write(folder, files)
    if as_json:
        write_json({"schema": 1, "kernel": kernel, "shape": shape_name, "tokens": list(tokens), "files": written})
    else:
        for path in written:
            write(f"tuned: {path}")
    return 0


def _check_writable(folder: Path) -> None:
    """Refuse a folder that cannot be made or written to before the measuring, which takes minutes."""
    from ..errors import ConfigError

    try:
        try_folder(folder)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written: {error.strerror}; name another folder with {DIRECTORY_VARIABLE}"
        ) from None


def _write(folder: Path, files: dict[str, str]) -> list[str]:
    """Write each file whole or not at all; a name that would leave the folder is the kernel's fault."""
    from ..errors import PluginLoadError

    if not files or any(not name or name != Path(name).name for name in files):
        raise PluginLoadError(f"the tune hook returned the file names {list(files)}; it has to return plain names")
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, text in files.items():
        replace_file(folder / name, text.encode())
        written.append(str(folder / name))
    return written
