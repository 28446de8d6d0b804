"""The INT8MOE_* variables: one reader each, and a warning for a name that nobody reads."""

from __future__ import annotations

import logging
import os

from .errors import ConfigError
from .near_names import near_names

VARIABLES = {
    "INT8MOE_KERNEL": "name of the kernel to use; it is used or an error is raised",
    "INT8MOE_PLUGINS": "comma-separated plugin names that may load, all others are blocked; each must be installed",
    "INT8MOE_DISABLE_PLUGINS": "comma-separated plugin names that may not load",
    "INT8MOE_STRICT": "1: a broken plugin raises instead of being listed",
    "INT8MOE_MAX_ISA": "highest instruction-set tier that may be used",
    "INT8MOE_NUM_THREADS": "workers per parallel region",
    "INT8MOE_CACHE_DIR": "folder of packed layers and tuned files; without it the user's cache folder",
    "INT8MOE_TRANSFORMERS_UNTESTED": "1: accept a version of transformers that int8moe was not tested with",
    "INT8MOE_LOG": "debug, info, warning or error",
}

logger = logging.getLogger("int8moe")


def names(variable: str) -> frozenset[str] | None:
    """The comma-separated names of a variable; None when it is not set or names nothing."""
    words = (os.environ.get(variable) or "").split(",")
    return frozenset(word.strip() for word in words if word.strip()) or None


def text(variable: str) -> str | None:
    """The value of a variable, stripped; None when it is not set or empty."""
    return (os.environ.get(variable) or "").strip() or None


def flag(variable: str) -> bool:
    """Whether a variable is switched on."""
    value = (os.environ.get(variable) or "").strip().lower()
    if value in ("", "0", "false", "no", "off"):
        return False
    if value in ("1", "true", "yes", "on"):
        return True
    raise ConfigError(f"{variable}={value!r}: set it to 1 or 0")


def num_threads_setting() -> int | None:
    """INT8MOE_NUM_THREADS as a number, or None when it is not set."""
    value = text("INT8MOE_NUM_THREADS")
    if value is None:
        return None
    if not value.isdecimal() or not 1 <= int(value) <= 4096:
        raise ConfigError(f"INT8MOE_NUM_THREADS={value!r}: set a whole number from 1 to 4096, or unset it")
    return int(value)


def log_level() -> str | None:
    """INT8MOE_LOG as the logging module writes it; None when it is not set."""
    level = text("INT8MOE_LOG")
    if level is not None and level.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise ConfigError(f"INT8MOE_LOG={level!r}: set debug, info, warning or error")
    return None if level is None else level.upper()


def configure_logging() -> None:
    """Apply INT8MOE_LOG to the "int8moe" logger."""
    level = log_level()
    if level is not None:
        logger.setLevel(level)


def absent_plugins(present: set[str]) -> dict[str, str]:
    """A line for each variable that names plugins which are not among those present, with near names."""
    faults = {}
    for variable in ("INT8MOE_PLUGINS", "INT8MOE_DISABLE_PLUGINS"):
        lines = []
        for name in sorted((names(variable) or frozenset()) - present):
            near = near_names(name, sorted(present), count=2, cutoff=0.4)
            hint = f"did you mean {' or '.join(near)}? " if near else ""
            lines.append(f"{variable} names {name!r}, which is not installed; {hint}")
        if lines:
            faults[variable] = f"{''.join(lines)}installed: {', '.join(sorted(present))}"
    return faults


def unknown_variables() -> dict[str, str]:
    """A line for each INT8MOE_* variable that nothing reads, with near names."""
    lines = {}
    for name in sorted(os.environ):
        if name.startswith("INT8MOE_") and name not in VARIABLES and not name.startswith("INT8MOE_TEST_"):
            near = near_names(name, VARIABLES, count=2)
            hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(VARIABLES)}"
            lines[name] = f"{name} is set, but nothing reads it; {hint}"
    return lines


_warned: set[str] = set()


def warn_unknown_variables() -> None:
    """Log each of :func:`unknown_variables` once per process."""
    for line in unknown_variables().values():
        if line not in _warned:
            _warned.add(line)
            logger.warning("%s", line)
