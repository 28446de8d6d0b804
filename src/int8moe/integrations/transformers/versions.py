"""Which versions of transformers the integration was tested with. Imports neither transformers nor torch."""

from __future__ import annotations

import importlib.metadata

from ...environment import flag
from ...errors import ConfigError

TESTED_VERSIONS = ("5.24",)
"""Minor versions with which the whole of tests/integration passed."""

_ADVICE = f"pip install 'transformers=={TESTED_VERSIONS[-1]}.*'"


def check_version() -> str:
    """The installed version of transformers.

    Raises:
        ConfigError: it is not installed, or not tested and INT8MOE_TRANSFORMERS_UNTESTED is not 1.
    """
    try:
        found = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"transformers is not installed: {_ADVICE}") from None
    minor = ".".join(found.split(".")[:2])
    if minor not in TESTED_VERSIONS and not flag("INT8MOE_TRANSFORMERS_UNTESTED"):
        raise ConfigError(
            f"transformers {found} is not tested with int8moe; tested are {', '.join(TESTED_VERSIONS)}: {_ADVICE}, "
            "or set INT8MOE_TRANSFORMERS_UNTESTED=1 to try it"
        )
    return found
