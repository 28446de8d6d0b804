"""Writes a new plugin's folder: whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import NamedTuple

from ..errors import ConfigError
from .names import PluginNames
from .render import render


class NewPlugin(NamedTuple):
    """What was written.

    Attributes:
        folder: of the distribution.
        names: what follows from the namespace.
        files: paths below the folder.
    """

    folder: Path
    names: PluginNames
    files: tuple[str, ...]


def write_plugin(names: PluginNames, folder: Path) -> NewPlugin:
    """Write the distribution of a new plugin.

    The files are written into a temporary folder beside, and the whole is renamed at the end.

    Args:
        names: checked by check_namespace and check_isa.
        folder: what to make; its parent exists.

    Raises:
        ConfigError: there is something already, the parent does not exist, or no folder of that name can be made.
        OSError: it cannot be written.
    """
    target = folder.absolute()
    if os.path.lexists(target):
        raise ConfigError(f"{folder} exists already: name a folder that does not, or remove it")
    if not target.parent.is_dir():
        if os.path.lexists(target.parent):
            raise ConfigError(f"{folder}: {target.parent} is no folder; name another place")
        raise ConfigError(f"{folder}: there is no folder {target.parent}; make it first")
    files = render(names)
    try:
        beside = tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{names.dashed}.")
    except OSError as error:
        raise ConfigError(f"{folder}: cannot write to {target.parent}: {error.strerror}; name another place") from None
    with beside:
        whole = Path(beside.name) / target.name  # a folder of its own, with the usual permissions
        try:
            whole.mkdir()
        except OSError as error:
            raise ConfigError(f"{folder}: cannot be made: {error.strerror}; name another folder") from None
        for path, data in files.items():
            (whole / path).parent.mkdir(parents=True, exist_ok=True)
            (whole / path).write_bytes(data)
        if os.path.lexists(target):  # an empty folder would be replaced in silence
            raise ConfigError(f"{folder} has appeared meanwhile: name another folder")
        whole.rename(target)
    return NewPlugin(folder, names, tuple(path.as_posix() for path in files))
