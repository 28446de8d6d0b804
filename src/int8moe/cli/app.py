"""Group of verbs, loaded lazily, and the one place where exceptions become exit codes.

0 = done, 1 = an error or a finding (one line on stderr), 2 = wrong usage, 130 = interrupted. A reader that
closes the pipe changes neither the exit code nor stderr (see :mod:`.output`).
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys

import click

from ..near_names import near_names
from .output import discard_stdout, flush, say

# One row a verb: module of this package (its click command is called ``command``), one line of help.
VERBS: dict[str, tuple[str, str]] = {
    "list-kernels": ("list_kernels", "What is installed, what this machine can run, and why not the rest."),
    "explain": ("explain", "Which kernel would serve a layer, and why no other."),
    "verify": ("verify", "Run the conformance suite on one kernel."),
    "doctor": ("doctor", "What is wrong with this installation and machine, and what mends it."),
    "run": ("run", "Pack and run the MoE layers of a checkpoint, and compare bits with the reference."),
    "generate": ("generate", "Continue a text with a whole model, its experts in INT8."),
    "eval": ("eval", "Bits per byte and perplexity of a text."),
    "bench": ("bench", "Time one MoE layer against the roofline of this machine."),
    "tune": ("tune", "Let a kernel measure what is fastest for a layer on this machine, and keep it."),
    "pack": ("pack", "Write the packed layers of a checkpoint to disk, so that loading only reads them."),
    "quantize": ("quantize", "Make a compressed-tensors W8A8 checkpoint of an unquantised one."),
    "new-plugin": ("new_plugin", "Write a kernel plugin that works, to be made one's own."),
}


class LazyGroup(click.Group):
    """A group whose help is the table above, so that listing verbs imports none of them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Verbs in the order of the table."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the verb's module."""
        if cmd_name not in VERBS:
            return None
        command = importlib.import_module(f".{VERBS[cmd_name][0]}", __package__).command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, with near names for a verb that does not exist."""
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            near = near_names(args[0], VERBS, count=2)
            hint = f"did you mean {' or '.join(near)}?" if near else f"verbs are {', '.join(VERBS)}."
            ctx.fail(f"There is no verb {args[0]!r}; {hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The verbs and their lines, from the table alone."""
        with formatter.section("Verbs"):
            formatter.write_dl([(name, text) for name, (_, text) in VERBS.items()])


def _print_version(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from importlib import metadata

        with contextlib.suppress(metadata.PackageNotFoundError):
            click.echo(f"int8moe {metadata.version('int8moe')}")
            ctx.exit()
        click.echo("int8moe (not installed: run from a source tree)")
        ctx.exit()


@click.group(
    name="int8moe",
    cls=LazyGroup,
    no_args_is_help=False,
    subcommand_metavar="VERB [ARGS]...",
    epilog="`int8moe VERB --help` tells more. Data goes to stdout (--json: one document), messages to stderr.",
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version and exit.",
)
@click.pass_context
def group(ctx: click.Context) -> None:
    """INT8 W8A8 fused mixture-of-experts kernels: a registry of plugins, one bit-exact result."""
    import logging
    import warnings

    from ..environment import configure_logging
    from ..errors import ConfigError

    class StderrHandler(logging.Handler):
        """Writes to whatever stderr is now: a progress bar may have put itself in front of it."""

        def emit(self, record: logging.LogRecord) -> None:
            say(f"{record.levelname.lower()}: {record.getMessage()}")

    try:
        configure_logging()
    except ConfigError:
        if ctx.invoked_subcommand != "doctor":  # whose finding it is, beside others
            raise
    logger = logging.getLogger("int8moe")
    logger.handlers = [StderrHandler()]
    logger.propagate = False
    # torch says so when numpy, which int8moe does not need, is absent.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")


def run(arguments: list[str]) -> int:
    """Run one command line.

    Returns:
        The exit status.
    """
    from ..errors import Int8MoEError

    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:  # a name may hold characters that the terminal's encoding lacks
            reconfigure(errors="backslashreplace")
    try:
        if "_INT8MOE_COMPLETE" in os.environ:
            group.main(arguments, prog_name="int8moe")
        with group.make_context("int8moe", list(arguments)) as context:
            status = group.invoke(context)
            return status if isinstance(status, int) else 0
    except click.exceptions.Exit as leaving:
        return leaving.exit_code
    except click.ClickException as error:
        return _usage_error(error)
    except (KeyboardInterrupt, click.Abort):
        return 130
    except BrokenPipeError:
        discard_stdout()
        return 0
    except Exception as error:
        _log_traceback()
        if isinstance(error, (Int8MoEError, OSError)):
            say(f"error: {error_line(error)}")
        else:
            say(
                f"error: unexpected {type(error).__name__}: {error_line(error)} "
                "(INT8MOE_LOG=debug shows where; please report it)"
            )
        return 1
    finally:
        flush()


def error_line(error: BaseException) -> str:
    """An exception's text on one line; an OSError's without its number."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{os.fsdecode(error.filename)}: {error.strerror}"
    text = ""
    try:
        message = str(error)
    except Exception:  # a plugin's own exception may fail at that, too
        message = ""
    for line in message.splitlines():
        if line := line.strip():
            text += f"{'' if not text else ' ' if text.endswith((':', '.', ';', ',')) else '; '}{line}"
    return text or type(error).__name__


def _usage_error(error: click.ClickException) -> int:
    message = " ".join(error.format_message().split())
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "int8moe"
    say(f"error: {message.rstrip('.')}. Try `{path} --help`.")
    return error.exit_code


def _log_traceback() -> None:
    if os.environ.get("INT8MOE_LOG", "").strip().lower() == "debug":
        import traceback

        traceback.print_exc()
