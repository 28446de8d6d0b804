"""Where ``int8moe tune`` writes what a kernel measured, and where the kernel finds it. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from .cache_folder import default_cache_directory


def tuned_folder(namespace: str) -> Path:
    """Folder of a plugin's tuned files: ``tuned/<namespace>`` below INT8MOE_CACHE_DIR, or the user's cache folder."""
    return default_cache_directory() / "tuned" / namespace
