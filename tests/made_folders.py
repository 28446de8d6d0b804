"""Folders that stand for procfs, sysfs and the like."""

from __future__ import annotations

from pathlib import Path


def put(root: Path, **files: str) -> Path:
    """Write files below a folder; two underscores in a keyword stand for a slash."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root
