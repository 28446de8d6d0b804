"""The control groups around this process, in both versions of the hierarchy: folders whose files hold limits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


def unified_folders(proc: Path, sys: Path) -> Iterator[Path]:
    """Folders of version 2, from this process's own group up to the root.

    Args:
        proc: where procfs is mounted.
        sys: where sysfs is mounted; groups lie in ``<sys>/fs/cgroup``.
    """
    return _up_to_root(sys / "fs" / "cgroup", _paths(proc).get("", "/"))


def controller_folders(proc: Path, sys: Path, controller: str) -> Iterator[Path]:
    """Folders of one controller of version 1 ("cpu", "memory"), from this process's own group up to the root."""
    return _up_to_root(sys / "fs" / "cgroup" / controller, _paths(proc).get(controller, "/"))


def file_words(path: Path) -> list[str]:
    """The words of a small file; none where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError):
        return []


def _paths(proc: Path) -> dict[str, str]:
    """Path of this process's group by controller; "" is the unified hierarchy."""
    paths: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines():
            _, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            for controller in controllers.split(","):
                paths[controller] = path
    return paths


def _up_to_root(root: Path, path: str) -> Iterator[Path]:
    # Inside a container the path may not exist below the mount: the ancestors that do are read.
    parts = [part for part in path.split("/") if part not in ("", ".", "..")]
    for depth in range(len(parts), -1, -1):
        yield root.joinpath(*parts[:depth])
