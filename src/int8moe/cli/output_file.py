"""Files that a verb writes: whole or not at all, and refused before the work rather than after it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import click


def check_writable(path: Path, option: str) -> None:
    """Refuse a path that :func:`replace_file` could not write.

    Raises:
        click.BadParameter: what is there instead of a folder that can be written to.
    """
    target = path.resolve()
    hint = f"'{option}'"
    if target.exists() and not target.is_file():
        what = "a folder" if target.is_dir() else "not an ordinary file"
        raise click.BadParameter(f"{path} is {what}; name a file", param_hint=hint)
    if not target.parent.is_dir():
        raise click.BadParameter(f"{path}: there is no folder {target.parent}; make it first", param_hint=hint)
    try:
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name[:100]}."):
            pass
    except OSError as error:
        raise click.BadParameter(
            f"{path}: cannot write to {target.parent}: {error.strerror}; name another folder", param_hint=hint
        ) from None


def try_folder(folder: Path) -> None:
    """Write in a folder, or in the nearest one above it where it does not exist yet; nothing stays.

    Raises:
        OSError: files cannot be put there.
    """
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    with tempfile.NamedTemporaryFile(dir=nearest, prefix=".int8moe."):
        pass


def replace_file(path: Path, data: bytes) -> None:
    """Write a file beside its place and rename it, so that no half file is ever seen."""
    target = path.resolve()  # a link keeps pointing to it
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:100]}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        Path(name).chmod(0o666 & ~_umask())  # mkstemp's files are for their owner alone
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
