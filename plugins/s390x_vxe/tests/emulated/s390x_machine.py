"""An s390x machine under qemu-user: Debian's Python and numpy, the core without torch, and this plugin's wheel.

    python s390x_machine.py FOLDER     # makes it there, or brings it up to date

It has no torch, so it lists kernels and calls the library through ctypes.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

PLUGIN = Path(__file__).resolve().parents[2]
CORE = PLUGIN.parents[1]
DEFAULT_FOLDER = PLUGIN / "build" / "emulated"
BUILD_WHEEL = CORE / "wheels" / "build.py"

# Command: Debian's package.
TOOLS = {
    "qemu-s390x-static": "qemu-user-static",
    "mmdebstrap": "mmdebstrap",
    "s390x-linux-gnu-g++": "g++-s390x-linux-gnu",
}
SUITE = "bookworm"
PACKAGES = ("python3", "python3-numpy")
# What Debian's numpy links to lies where its packages' scripts, which do not run here, would point to.
LIBRARY_FOLDERS = ("/usr/lib/s390x-linux-gnu/blas", "/usr/lib/s390x-linux-gnu/lapack")
PLATFORMS = ("manylinux_2_36_s390x", "manylinux_2_28_s390x", "manylinux_2_17_s390x", "manylinux2014_s390x")  # of SUITE
NOT_NEEDED = ("torch", "safetensors", "xxhash")  # of the core's requirements: by nothing that runs here


class Model(NamedTuple):
    """A processor: qemu's name for it, the line of features that Linux would print, and the tiers that it can run."""

    cpu: str
    features: str
    tiers: tuple[str, ...]


_BASE = "esan3 zarch stfle msa ldisp eimm dfp edat etf3eh highgprs"
MODELS = {
    "z14": Model("max", f"{_BASE} vx vxd vxe", ("scalar", "vx", "vxe")),
    "z13": Model("max,vxeh=off", f"{_BASE} vx", ("scalar", "vx")),
    "no-vx": Model("max,vx=off", _BASE, ("scalar",)),  # qemu leaves the bit of vxe set in AT_HWCAP
}


def missing_tools() -> str | None:
    """What has to be installed, as a sentence; None when everything is there."""
    missing = {command: package for command, package in TOOLS.items() if shutil.which(command) is None}
    if not missing:
        return None
    return f"{', '.join(missing)} not found: apt-get install {' '.join(sorted(set(missing.values())))}"


def _run(*command: str | Path, **environment: str) -> None:
    subprocess.run([str(c) for c in command], check=True, env={**os.environ, **environment}, stdin=subprocess.DEVNULL)


def _core_requirements() -> list[str]:
    wanted = [line for line in importlib.metadata.requires("int8moe") or () if "extra ==" not in line]
    return [line for line in wanted if (re.match(r"[\w-]+", line) or [""])[0] not in NOT_NEEDED]


def _sources() -> Iterator[Path]:
    for folder in (CORE / "src", PLUGIN / "src", PLUGIN / "csrc"):
        yield from (path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix != ".pyc")
    yield from (CORE / "pyproject.toml", BUILD_WHEEL, Path(__file__).resolve())
    yield from (PLUGIN / name for name in ("pyproject.toml", "CMakeLists.txt"))


class Machine:
    """The machine in a folder: ``rootfs`` of Debian, ``site`` of Python packages, ``wheel`` of this plugin."""

    def __init__(self, folder: Path = DEFAULT_FOLDER) -> None:
        self.folder, self.rootfs, self.site = folder, folder / "rootfs", folder / "site"
        self.wheels, self._stamp = folder / "wheel", folder / "site" / "digest.txt"

    @property
    def exists(self) -> bool:
        """Whether it was made before; it may be out of date."""
        return self.rootfs.is_dir()

    @property
    def objects(self) -> Path:
        """CMake's folder with the objects of the wheel."""
        return self.wheels / "objects"

    def prepare(self) -> None:
        """Make what is missing or of other sources."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.exists:
            self._replace(self.rootfs, self._make_rootfs)
        digest = hashlib.sha256()
        for path in _sources():
            digest.update(str(path.relative_to(CORE)).encode() + path.read_bytes())
        if self._stamp.is_file() and self._stamp.read_text() == digest.hexdigest():
            return
        self._replace(self.wheels, self._cross_build)
        self._replace(self.site, self._make_site)
        self._stamp.write_text(digest.hexdigest())

    def _replace(self, target: Path, make: Callable[[Path], None]) -> None:
        """Make a folder aside, then put it in its place."""
        with tempfile.TemporaryDirectory(dir=self.folder) as aside:
            made = Path(aside, target.name)
            made.mkdir()
            make(made)
            shutil.rmtree(target, ignore_errors=True)
            made.rename(target)

    def _make_rootfs(self, folder: Path) -> None:
        options = ("--quiet", "--variant=extract", "--arch=s390x", f"--include={','.join(PACKAGES)}")
        _run("mmdebstrap", *options, SUITE, folder)

    def _cross_build(self, folder: Path) -> None:
        """This plugin's wheel, tagged as it would be published; its objects beside it."""
        _run(sys.executable, BUILD_WHEEL, folder, PLUGIN.relative_to(CORE), "--objects", folder / "objects")

    @property
    def _python(self) -> Path:
        found = [p for p in self.rootfs.glob("usr/bin/python3.*") if re.fullmatch(r"python3\.\d+", p.name)]
        (python,) = found
        return python

    def _make_site(self, folder: Path) -> None:
        version = self._python.name.removeprefix("python")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), "--only-binary=:all:",
               "--python-version", version, "--implementation", "cp",
               *(f"--platform={platform}" for platform in PLATFORMS)]  # fmt: skip
        core = folder.parent / "core"
        _run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", core, CORE)
        _run(*pip, *_core_requirements())
        _run(*pip, "--no-deps", *core.glob("*.whl"), *self.wheels.glob("*.whl"))

    def run(self, model: str, *arguments: str | Path, timeout: float = 1800) -> subprocess.CompletedProcess[str]:
        """Run the machine's Python on one of MODELS.

        The file of features that qemu 7 does not emulate is written first: one run at a time.
        """
        cpu, features, _ = MODELS[model]
        cpuinfo = self.rootfs / "proc" / "cpuinfo"
        cpuinfo.parent.mkdir(exist_ok=True)
        cpuinfo.write_text(f"vendor_id       : IBM/S390\nfeatures\t: {features}\n")
        command = [
            "qemu-s390x-static", "-cpu", cpu, "-L", self.rootfs,
            "-E", f"LD_LIBRARY_PATH={':'.join(LIBRARY_FOLDERS)}", "-E", f"PYTHONPATH={self.site}",
            self._python, *arguments,
        ]  # fmt: skip
        keep = {name: value for name, value in os.environ.items() if not name.startswith(("INT8MOE_", "PYTHON"))}
        return subprocess.run(
            [str(c) for c in command], env=keep, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=timeout, check=False,
        )  # fmt: skip


def main(arguments: list[str]) -> int:
    """Make the machine."""
    if len(arguments) != 1:
        print(__doc__)
        return 2
    if reason := missing_tools():
        print(f"s390x_machine.py: {reason}", file=sys.stderr)
        return 1
    try:
        Machine(Path(arguments[0]).resolve()).prepare()
    except subprocess.CalledProcessError as error:  # it has said why
        print(f"s390x_machine.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
