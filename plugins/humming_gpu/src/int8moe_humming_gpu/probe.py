"""Whether the package and the device are here, as Facts, and why the kernel is refused. Imports no torch."""

from __future__ import annotations

import os
import re
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

PACKAGE = "humming-kernels"
OLDEST, FIRST_UNKNOWN = "0.1.20", "0.2"
"""The functions that are called were read in 0.1.20."""

MEND = f"pip install '{PACKAGE}[cu12]>={OLDEST},<{FIRST_UNKNOWN}', or [cu13], as torch was built"

_CUDA = re.compile(r"""^cuda\b[^=\n]*=\s*["']""", re.MULTILINE)


class Facts(NamedTuple):
    """The defaults are a machine and an environment that have nothing.

    Attributes:
        nvidia: the NVIDIA driver shows a device.
        torch_cuda: torch is a build for CUDA.
        humming: version of the package; None = not installed.
    """

    nvidia: bool = False
    torch_cuda: bool = False
    humming: str | None = None


def read_facts(dev: str | os.PathLike[str] = "/dev") -> Facts:
    """Look at the device files and, where there is a device, at the installed packages; tests replace it."""
    devices = Path(dev)
    if not (any(devices.glob("nvidia[0-9]*")) or (devices / "dxg").exists()):
        return Facts()
    try:
        version = metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        version = None
    return Facts(nvidia=True, torch_cuda=_torch_is_for_cuda(), humming=version)


def refusal(facts: Facts) -> str | None:
    """Why the kernel cannot run with these facts, the nearest obstacle first; None when it can."""
    if not facts.nvidia:
        return "no GPU: the system shows no NVIDIA device (/dev/nvidia0)"
    if not facts.torch_cuda:
        return "torch is not a build for CUDA: install torch's CUDA build"
    if facts.humming is None:
        return f"{PACKAGE} is not installed: {MEND}"
    from packaging.version import InvalidVersion, Version

    try:
        known = Version(OLDEST) <= Version(facts.humming) < Version(FIRST_UNKNOWN)
    except InvalidVersion:
        known = False
    if not known:
        return f"{PACKAGE} is {facts.humming}: {MEND}"
    return None


def _torch_is_for_cuda() -> bool:
    """From its version.py, without importing it."""
    spec = find_spec("torch")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder) / "version.py"
        if path.is_file():
            return _CUDA.search(path.read_text(encoding="utf-8", errors="replace")) is not None
    return False
