"""What this machine and environment offer, as Facts, and why the kernel is refused. Imports no torch and no triton.

Nothing here starts a driver: a process that has, cannot use it in a child of fork. Which architecture the device has is
asked when a kernel is chosen (see :mod:`.devices`).
"""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

OLDEST_TRITON = "3.6"
"""Ahead-of-time checks and the interpreter were run with it or newer."""

OLDEST_TORCH = "2.10"
"""The first whose GPU builds bring OLDEST_TRITON."""

_VERSION = re.compile(r"""^__version__\s*=\s*["']([^"']+)["']""", re.MULTILINE)
_BUILD = re.compile(r"""^(cuda|hip)\b[^=\n]*=\s*["']([^"']+)["']""", re.MULTILINE)


class Facts(NamedTuple):
    """The defaults are a machine and an environment that have nothing.

    Attributes:
        nvidia: the NVIDIA driver shows a device.
        amd: the AMD driver shows a device.
        torch_build: "cuda" or "hip", what torch was built for; None = CPUs alone, or no torch.
        triton: version of the module ``triton``; None = not installed, "" = it does not say.
        interpreted: TRITON_INTERPRET=1, under which kernels run on CPU tensors, for tests.
    """

    nvidia: bool = False
    amd: bool = False
    torch_build: str | None = None
    triton: str | None = None
    interpreted: bool = False


def read_facts(dev: str | os.PathLike[str] = "/dev") -> Facts:
    """Look at the device files and, where a kernel could run, at the installed modules; tests replace it.

    Every command lists kernels, so that what cannot matter is not looked for.
    """
    devices = Path(dev)
    nvidia = any(devices.glob("nvidia[0-9]*")) or (devices / "dxg").exists()
    amd = (devices / "kfd").exists()
    interpreted = os.environ.get("TRITON_INTERPRET", "").strip().lower() in ("1", "true", "on", "yes")
    return Facts(
        nvidia=nvidia,
        amd=amd,
        torch_build=_torch_build() if nvidia or amd else None,
        triton=triton_version() if nvidia or amd or interpreted else None,
        interpreted=interpreted,
    )


def refusal(facts: Facts) -> str | None:
    """Why the kernel cannot run with these facts, the nearest obstacle first; None when it can."""
    if not facts.interpreted:
        if not (facts.nvidia or facts.amd):
            return (
                "no GPU: the system shows no NVIDIA device (/dev/nvidia0) and no AMD device (/dev/kfd); "
                "where there is one, install its driver, or give it to the container"
            )
        wanted = {"cuda": facts.nvidia, "hip": facts.amd}
        if not wanted.get(facts.torch_build or ""):
            vendor, name = ("NVIDIA", "CUDA") if facts.nvidia else ("AMD", "ROCm")
            found = {"cuda": "for CUDA", "hip": "for ROCm", None: "for CPUs alone"}[facts.torch_build]
            return f"the device is from {vendor}, but torch is a build {found}: install torch's {name} build"
    if facts.triton is None:
        return f"triton is not installed: {_mend(facts)}"
    from packaging.version import InvalidVersion, Version

    try:
        old = Version(facts.triton) < Version(OLDEST_TRITON)
    except InvalidVersion:
        return f"the installed triton does not say which version it is: {_mend(facts)}"
    if old:
        return f"triton {facts.triton} is too old, {OLDEST_TRITON} or newer is needed: {_mend(facts)}"
    return None


def _mend(facts: Facts) -> str:
    """A GPU build of torch wants the one triton that it was made with, which for AMD comes under another name."""
    name = {"cuda": "CUDA", "hip": "ROCm"}.get(facts.torch_build or "")
    if name is None:
        return f"pip install -U 'triton>={OLDEST_TRITON}'"
    return f"install torch {OLDEST_TORCH} or newer, built for {name}, which brings it"


def triton_version() -> str | None:
    """Version of the installed triton, "" where it does not say, None without one; nothing is imported.

    It is the module's own: the distribution has other names in builds for other vendors.
    """
    source = _source("triton", "__init__.py")
    if source is None:
        return None
    found = _VERSION.search(source)
    return found[1] if found else ""


def _torch_build() -> str | None:
    found = _BUILD.search(_source("torch", "version.py") or "")
    return found[1] if found else None


def _source(module: str, file: str) -> str | None:
    """Text of a file of an installed package, without importing it."""
    spec = find_spec(module)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder) / file
        if path.is_file():
            return path.read_text(encoding="utf-8", errors="replace")
    return None
