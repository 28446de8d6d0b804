"""The ``int8moe`` command. Importing this package imports nothing; each verb is a module, loaded when used."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Console script: run the command line of this process and exit with its status."""
    import sys

    try:
        _main()
    except KeyboardInterrupt:  # while modules are imported, or while the interpreter is about to end
        sys.exit(130)


def _main() -> None:
    import gc
    import os
    import sys

    # All of this is for the CPU time of small verbs: start-up makes many objects and hardly any garbage, at exit the
    # interpreter would search all of them once more, and pydantic would look for tracers in every distribution.
    gc.set_threshold(100_000)
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    from .output import claim_stdout

    claim_stdout()
    from .app import run

    status = run(sys.argv[1:])
    sys.stdout = sys.stderr  # for what plugins print while the interpreter ends
    gc.freeze()
    sys.exit(status)
