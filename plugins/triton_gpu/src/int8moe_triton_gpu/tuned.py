"""Tuned tiles: a JSON file for each device and layer, found once, and the defaults where there is none.

``int8moe tune`` writes ``<architecture>-<device>-E<E>-I<I>-H<H>.json``. It is looked for in this user's folder of tuned
files (:func:`int8moe.tuned_files.tuned_folder`), then in ``tuned/`` of this package, for files that were measured for
everybody: there is none yet. Otherwise ``tiles.json`` serves, and the log says so.
"""

from __future__ import annotations

import logging
import re
from functools import cache
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from int8moe.errors import ConfigError
from int8moe.tuned_files import tuned_folder

from .devices import Device, find_device
from .tiles import SCHEMA, Steps, default_steps

logger = logging.getLogger("int8moe.triton_gpu")

_SHIPPED = Path(__file__).with_name("tuned")


class TunedFile(BaseModel):
    """What such a file holds.

    Attributes:
        schema_version: SCHEMA.
        device, architecture: where it was measured.
        triton: version of the compiler.
        num_experts, intermediate_size, hidden_size: E, I, H of the layer.
        steps: the tiles.
        microseconds: of a forward by tokens, with these tiles; for people.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int
    device: str
    architecture: str
    triton: str
    num_experts: int
    intermediate_size: int
    hidden_size: int
    steps: Steps
    microseconds: dict[str, float] = {}


def file_name(device: Device, experts: int, inner: int, hidden: int) -> str:
    """Name of the file for a layer on a device."""
    name = re.sub(r"[^A-Za-z0-9]+", "_", device.name).strip("_")
    return f"{device.architecture}-{name}-E{experts}-I{inner}-H{hidden}.json"


def read_tuned(path: Path) -> TunedFile:
    """A file that ``int8moe tune`` wrote.

    Raises:
        ConfigError: it cannot be read, or is not what ``int8moe tune`` writes.
    """
    try:
        found = TunedFile.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (ValidationError, UnicodeDecodeError) as error:
        first = str(error.errors()[0]["msg"]) if isinstance(error, ValidationError) else str(error)
        raise ConfigError(f"{path}: not a file of tuned tiles: {first}; delete it, or run int8moe tune again") from None
    if found.schema_version != SCHEMA:
        raise ConfigError(
            f"{path}: schema {found.schema_version}, this release reads {SCHEMA}; delete it, or run int8moe tune again"
        )
    return found


def _misplaced(found: TunedFile, device: Device, experts: int, inner: int, hidden: int) -> str | None:
    """What a file was measured for, if it is something else."""
    wanted = (device.name, device.architecture, experts, inner, hidden)
    measured = (found.device, found.architecture, found.num_experts, found.intermediate_size, found.hidden_size)
    if measured == wanted:
        return None
    return "measured on {} ({}) for E {}, I {}, H {}".format(*measured)


def steps_for(device: torch.device, experts: int, inner: int, hidden: int) -> Steps:
    """Tiles for a layer of E experts, I and H on a device; the first call for each says in the log which they are."""
    return _steps_for(find_device(device), experts, inner, hidden)


@cache
def _steps_for(device: Device, experts: int, inner: int, hidden: int) -> Steps:
    name = file_name(device, experts, inner, hidden)
    for folder in (tuned_folder("triton_gpu"), _SHIPPED):
        path = folder / name
        try:
            there = path.is_file()
        except OSError as error:  # a folder of another user: a tile changes no bit, so that the defaults will do
            logger.warning("%s: %s; tuned tiles are not looked for there, INT8MOE_CACHE_DIR names another folder",
                           folder, error.strerror)  # fmt: skip
            continue
        if there:
            found = read_tuned(path)
            other = _misplaced(found, device, experts, inner, hidden)
            if other is not None:
                raise ConfigError(f"{path}: {other}, which its name does not say; delete it, or run int8moe tune again")
            logger.info("tuned tiles of %s", path)
            return found.steps
    logger.info(
        "no tuned tiles for E %d, I %d, H %d on %s (%s): the defaults serve; `int8moe tune` measures",
        experts, inner, hidden, device.name, name,
    )  # fmt: skip
    return default_steps(device.family)
