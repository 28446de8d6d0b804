"""An AArch64 system with Python, torch and int8moe in a folder, run by QEMU's user mode on a machine of another kind.

    python arm64_root.py make FOLDER                  # some minutes; what is complete is kept, int8moe is built anew
    python arm64_root.py run FOLDER --model max -- -m int8moe list-kernels

Needs mmdebstrap, qemu-user-static and g++-aarch64-linux-gnu on a Debian system, and a package index. Nothing is written
outside the folder. Emulated speed says nothing about a processor.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import click

REPOSITORY = Path(__file__).resolve().parents[4]
EMULATORS = ("qemu-aarch64-static", "qemu-aarch64")
TOOLS = ("mmdebstrap", "aarch64-linux-gnu-gcc", "aarch64-linux-gnu-g++")
DEBIAN_PACKAGES = "python3,libgomp1,libstdc++6"
# The last whose wheel for AArch64 needs no CUDA.
TORCH = "torch==2.10.0"
# What torch and the core import, in the versions of this environment: resolving them for another machine would judge
# their markers by this one.
PYTHON_PACKAGES = (
    "annotated-types", "click", "filelock", "fsspec", "jinja2", "markdown-it-py", "markupsafe", "mdurl", "mpmath", "networkx",
    "packaging", "platformdirs", "pluggy", "pydantic", "pydantic-core", "pygments", "rich", "safetensors", "sympy",
    "typing-extensions", "typing-inspection", "xxhash",
)  # fmt: skip
PLATFORMS = ("linux_aarch64", *(f"manylinux_2_{minor}_aarch64" for minor in (17, 27, 28)), "manylinux2014_aarch64")
# Bits of AT_HWCAP and AT_HWCAP2, in the words of /proc/cpuinfo: those that the plugin's kernels ask for.
HWCAP, HWCAP2 = {1: "asimd", 8: "atomics", 20: "asimddp"}, {13: "i8mm"}


def _emulator() -> str:
    found = next(filter(None, map(shutil.which, EMULATORS)), None)
    if found is None:
        raise click.ClickException(f"{' or '.join(EMULATORS)} is not installed; apt-get install qemu-user-static")
    return found


def _run(*command: str | Path, **environment: str) -> str:
    done = subprocess.run(
        list(map(str, command)),
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise click.ClickException(
            f"{' '.join(map(str, command))[:200]}: {(done.stderr or done.stdout).strip()[-2000:]}"
        )
    return done.stdout


def _sources() -> tuple[str, Path]:
    """Release and package sources of this Debian."""
    words = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    places = (Path("/etc/apt/sources.list.d/debian.sources"), Path("/etc/apt/sources.list"))
    sources = next(filter(Path.is_file, places), None)
    if words.get("ID") != "debian" or sources is None:
        raise click.ClickException("the system is made from Debian's packages: this works on a Debian only")
    return words["VERSION_CODENAME"].strip('"'), sources


class Arm64Root:
    """The folder: ``rootfs`` (Debian), ``site`` (Python packages), ``int8moe`` (this checkout), ``models``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.rootfs, self.site, self.own = (self.folder / name for name in ("rootfs", "site", "int8moe"))

    @property
    def python_version(self) -> str:
        """Of the system's Python, such as 3.11."""
        found = next((self.rootfs / "usr" / "bin").glob("python3.[0-9]*[0-9]"), None)
        if found is None:
            raise click.ClickException(f"{self.rootfs} has no Python: remove {self.folder} and make it again")
        return found.name.removeprefix("python")

    def make_system(self) -> None:
        """Debian's Python, unpacked."""
        if self.rootfs.exists():
            return
        release, sources = _sources()
        partial = self.folder / "rootfs.partial"
        shutil.rmtree(partial, ignore_errors=True)
        _run("mmdebstrap", "-q", "--variant=extract", "--arch=arm64", f"--include={DEBIAN_PACKAGES}", release, partial,
             sources)  # fmt: skip
        partial.rename(self.rootfs)

    def _install(self, target: Path, *requirements: str | Path) -> None:
        tags = [option for platform in PLATFORMS for option in ("--platform", platform)]
        python = self.python_version
        _run(sys.executable, "-m", "pip", "install", "-q", "--no-compile", "--no-deps", "--only-binary=:all:", "--target",
             target, *tags, "--python-version", python, "--implementation", "cp", "--abi", f"cp{python.replace('.', '')}",
             "--abi", "abi3", "--abi", "none", *requirements)  # fmt: skip
        # Byte code of the same Python: to compile under the emulator takes far longer.
        compiler = sys.executable if python == f"{sys.version_info[0]}.{sys.version_info[1]}" else f"python{python}"
        if shutil.which(compiler):
            subprocess.run([compiler, "-m", "compileall", "-q", "-j2", str(target)], check=False)

    def make_packages(self) -> None:
        """Torch, and what it and the core import."""
        if self.site.exists():
            return
        partial = self.folder / "site.partial"
        shutil.rmtree(partial, ignore_errors=True)
        self._install(partial, TORCH, *(f"{name}=={version(name)}" for name in PYTHON_PACKAGES))
        partial.rename(self.site)

    def make_int8moe(self) -> None:
        """The core and the cross-built plugin, from wheels of this checkout."""
        wheels, partial = self.folder / "wheels", self.folder / "int8moe.partial"
        for folder in (wheels, partial):
            shutil.rmtree(folder, ignore_errors=True)
        _run(sys.executable, REPOSITORY / "wheels/build.py", wheels, ".", "plugins/aarch64_neon")
        self._install(partial, *sorted(wheels.glob("*.whl")))
        shutil.rmtree(self.own, ignore_errors=True)
        partial.rename(self.own)

    def environment(self) -> dict[str, str]:
        """What the emulated Python needs in its environment."""
        return {
            "PYTHONHOME": str(self.rootfs / "usr"),
            "PYTHONPATH": os.pathsep.join(map(str, (self.own, self.site))),
        }

    def python(self, model: str) -> Path:
        """A script that runs the system's Python on a model of a CPU.

        It is ``sys.executable`` there, so that Python can start others of its kind. Each model has the system by links,
        and a /proc/cpuinfo of its own, which older QEMUs would take from this machine.
        """
        place = self.folder / "models" / re.sub(r"\W+", "-", model)
        if place.exists():
            return place / "python"
        place.parent.mkdir(exist_ok=True)
        partial = place.with_suffix(f".{os.getpid()}")
        (partial / "proc").mkdir(parents=True)
        # No others: QEMU looks here first, and a link in the place of /tmp or /home would be what programs resolve paths to.
        for name in ("etc", "lib", "usr"):
            (partial / name).symlink_to(self.rootfs / name)
        (partial / "proc" / "cpuinfo").write_text(f"processor\t: 0\nFeatures\t: {' '.join(self._words(model))}\n")
        program = self.rootfs / "usr" / "bin" / f"python{self.python_version}"
        script = partial / "python"
        script.write_text(f'#!/bin/sh\nexec "{_emulator()}" -cpu "{model}" -0 "$0" -L "{place}" "{program}" "$@"\n')
        script.chmod(0o755)
        try:
            partial.rename(place)
        except OSError:  # another process made it meanwhile
            shutil.rmtree(partial)
        return place / "python"

    def _words(self, model: str) -> list[str]:
        """A model's feature words, by what it tells the C library."""
        loader = self.rootfs / "lib" / "ld-linux-aarch64.so.1"
        text = _run(_emulator(), "-cpu", model, "-L", self.rootfs, loader, "--list-diagnostics")
        words = []
        for name, table in (("dl_hwcap", HWCAP), ("dl_hwcap2", HWCAP2)):
            match = re.search(rf"^{name}=0x([0-9a-f]+)$", text, re.MULTILINE)
            if match is None:
                raise click.ClickException(f"{loader} states no {name}")
            words += [word for bit, word in table.items() if int(match[1], 16) >> bit & 1]
        return words


@click.group(help=__doc__.partition("\n")[0] if __doc__ else None)
def main() -> None:
    """Two commands."""


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
def make(folder: Path) -> None:
    """Make FOLDER, or bring int8moe in it up to date."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise click.ClickException(
            f"{', '.join(missing)}: not installed; apt-get install mmdebstrap qemu-user-static g++-aarch64-linux-gnu"
        )
    root = Arm64Root(folder)
    root.folder.mkdir(parents=True, exist_ok=True)
    for step in (root.make_system, root.make_packages, root.make_int8moe):
        step()
    click.echo(f"{root.folder}: Python {root.python_version}, {TORCH}")


@main.command(context_settings={"ignore_unknown_options": True})
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--model", default="max,sve=off", show_default=True, help="One of QEMU's CPU models.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(folder: Path, model: str, arguments: tuple[str, ...]) -> None:
    """Run FOLDER's Python with ARGUMENTS."""
    root = Arm64Root(folder)
    if not all(part.exists() for part in (root.rootfs, root.site, root.own)):
        raise click.ClickException(f"{folder} is not complete: make it first")
    python = root.python(model)
    os.execve(python, [str(python), *arguments], {**os.environ, **root.environment()})


if __name__ == "__main__":
    main()
