"""The user's folder of what int8moe keeps on disk: packed layers and tuned files. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from .environment import text

DIRECTORY_VARIABLE = "INT8MOE_CACHE_DIR"


def default_cache_directory() -> Path:
    """INT8MOE_CACHE_DIR, or the user's cache folder as this system has it."""
    named = text(DIRECTORY_VARIABLE)
    if named is not None:
        return Path(named).expanduser()
    import platformdirs

    return platformdirs.user_cache_path("int8moe", appauthor=False)


def why_unwritable(error: OSError) -> str:
    """Why packed layers cannot be written, and what to do."""
    return f"{error.strerror}; name another folder with {DIRECTORY_VARIABLE} or --cache-dir"
