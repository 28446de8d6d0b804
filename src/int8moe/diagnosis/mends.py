"""Commands that several checks advise: to install a distribution again, or to leave a plugin out."""

from __future__ import annotations

import json
import shlex
from importlib import metadata
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import url2pathname

from .. import environment


class Source(NamedTuple):
    """The folder that a distribution was installed from, and whether it is used from there."""

    folder: str
    editable: bool


def source_of(distribution: metadata.Distribution) -> Source | None:
    """Where the installer says that it found the distribution; None where that is no folder."""
    try:
        origin: Any = json.loads(distribution.read_text("direct_url.json") or "null")
        url = urlsplit(origin["url"])
        if url.scheme == "file":
            return Source(url2pathname(url.path), bool(origin["dir_info"].get("editable", False)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # none of its business, or damaged
        pass
    return None


def _source(name: str) -> Source | None:
    try:
        return source_of(metadata.distribution(name))
    except (metadata.PackageNotFoundError, ValueError):
        return None


def editable_folder(name: str) -> str | None:
    """Folder of a distribution that is installed editable, so that its fault is mended there; else None."""
    source = _source(name)
    return source.folder if source is not None and source.editable else None


def reinstall(name: str) -> str:
    """To install a distribution again, from where it was installed."""
    source = _source(name)
    if source is None:
        return f"pip install --force-reinstall --no-deps {shlex.quote(name)}"
    how = "-e" if source.editable else "--force-reinstall --no-deps"
    return f"pip install {how} {shlex.quote(source.folder)}"


def with_extra(extra: str) -> str:
    """To install what an extra of int8moe names. No package index has int8moe yet, so that goes from a checkout."""
    return f"in a checkout of int8moe: pip install '.[{extra}]'"


def leave_out(*plugins: str) -> str:
    """To load all plugins but these, and but those that are blocked already."""
    names = sorted({*plugins, *(environment.names("INT8MOE_DISABLE_PLUGINS") or ())})
    return f"export INT8MOE_DISABLE_PLUGINS={','.join(names)}"
