"""What every native plugin's checks/ look for, whatever the instruction set: in objects, in the library, in the wheel.

A plugin's own check_objects.py adds what it knows of its instructions.
"""

from __future__ import annotations

import platform
import re
import subprocess
import tempfile
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path


class Binutils:
    """The binutils of a machine: plain there, cross-built elsewhere.

    Args:
        machines: values of ``platform.machine()`` that need no prefix.
        prefix: of the programs elsewhere, such as ``aarch64-linux-gnu-``.
        loader: what the name of the machine's dynamic loader begins with.
    """

    def __init__(self, machines: Collection[str], prefix: str = "", loader: str = "ld-linux") -> None:
        self.prefix = "" if platform.machine() in machines else prefix
        self._allowed = ("libc.so", "libm.so", "libgcc_s.so", loader, "libc.musl")

    def run(self, tool: str, *arguments: str) -> str:
        """Output of one of them."""
        command = (self.prefix + tool, *arguments)
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def symbol_faults(self, path: Path, stem: str) -> Iterator[str]:
        """Symbols of the object of ``stem``.cpp that the linker could merge with another unit's."""
        own = rf"int8moe_{stem}$" if stem.startswith("tier_") else r"int8moe_"  # what it may define for others
        for line in self.run("nm", str(path)).splitlines():
            kind, name = line.split()[-2:]
            if kind in "wWvVu":
                yield f"{path.name}: weak or unique symbol {name}: the linker could merge it with another tier's"
            elif kind.isupper() and kind != "U" and not re.match(own, name):
                yield f"{path.name}: defines {name} for other units"

    def library_faults(self, path: Path, also_exported: re.Pattern[str] | None = None) -> Iterator[str]:
        """Foreign run-time libraries of a shared library, and exports beyond the C interface."""
        for name in re.findall(r"\(NEEDED\).*\[(.*)\]", self.run("readelf", "-d", str(path))):
            if not name.startswith(self._allowed):
                yield f"{path.name}: needs {name}; an int8moe library needs the C library only"
        for line in self.run("nm", "-D", "--defined-only", str(path)).splitlines():
            name = line.split()[-1]
            known = name.startswith("int8moe_") or name in ("_init", "_fini")
            if not known and not (also_exported and also_exported.match(name)):
                yield f"{path.name}: exports {name}"


def build_faults(
    build: Path,
    stems: Iterable[str],
    check_object: Callable[[Path, str], Iterable[str]],
    check_library: Callable[[Path], Iterable[str]],
    libraries: Iterable[Path] = (),
) -> list[str]:
    """What is wrong with a CMake build, a line each.

    Args:
        build: its folder.
        stems: of the units' sources.
        check_object: faults of one object of a stem.
        check_library: faults of the shared library.
        libraries: these; without any, those of the build.
    """
    faults: list[str] = []
    for stem in stems:
        found = sorted(build.rglob(f"int8moe_objects.dir/**/{stem}.cpp.o"))
        if not found:
            faults.append(f"{build}: no object of {stem}.cpp")
        for path in found:
            faults += dict.fromkeys(check_object(path, stem))
    found = list(libraries) or sorted(build.rglob("libint8moe_*.so"))
    if not found:
        faults.append(f"{build}: no libint8moe_*.so")
    for library in found:
        faults += check_library(library)
    return faults


def wheel_faults(wheel: Path, package: str, check_library: Callable[[Path], Iterable[str]]) -> Iterator[str]:
    """What is wrong with a wheel: it holds the package's library alone, for any Python."""
    own = f"lib{package}.so"
    if "-py3-none-" not in wheel.name:
        yield f"{wheel.name}: is bound to one Python; py3-none is wanted"
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
        libraries = [name for name in archive.namelist() if ".so" in Path(name).name]
        if libraries != [f"{package}/{own}"]:
            yield f"{wheel.name}: holds the libraries {libraries or 'none'}; {own} alone is wanted"
        for name in libraries:
            yield from check_library(Path(folder, name))


def report(faults: Collection[str], praise: str) -> int:
    """Print a line a fault, or that there is none; the exit status."""
    for fault in faults:
        print(fault)
    if not faults:
        print(f"ok: {praise}")
    return 1 if faults else 0
