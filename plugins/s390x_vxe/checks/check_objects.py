"""Check built objects: each unit keeps to its machine's instructions, and owns its copies of everything.

    python check_objects.py BUILD_FOLDER

BUILD_FOLDER is a CMake build of this plugin, cross-compiled or not. Exits non-zero with one line a fault. Needs the
binutils of s390x.
"""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

BINUTILS = "" if platform.machine() == "s390x" else "s390x-linux-gnu-"

# Vector registers: every instruction of the vector facility begins with v or w, and nothing else does.
VECTOR = re.compile(r"^[vw]")
# Single precision, and what else came with z14; then with z15.
Z14 = re.compile(
    r"^[vw]f\w*sb$|^[vw]f\w*xb$|^wf[ck]xb|^v(bperm|msl\w*|nx|nn|oc|popct[bhfg]|lrl|strl|lip|pkz|upkz|tp|cp)"
)
Z15 = re.compile(
    r"^v(lbr|lebr|ller|llebr|lbrrep|ler|stbr|stebr|ster|sld|srd|strs|cfps|clfp|csfp|clgfp)|^[vw]c(ef|elf|fe|lfe)b"
)
# Multiply and add in one rounding: the numerics contract forbids it. (VFMSB is a plain multiplication.)
FUSED = re.compile(r"^[vw]fn?m[as][sdx]b$|^m[as][ed]b?r?$")


class Unit(NamedTuple):
    """What one object may not and must contain."""

    foreign: tuple[re.Pattern[str], ...]
    wanted: tuple[str, ...]


UNITS = {
    "dispatcher": Unit((VECTOR,), ()),
    "tier_scalar": Unit((VECTOR,), ("msgf",)),
    "tier_vx": Unit((Z14, Z15), ("vmaeb", "vmaob", "vsumh", "vlrepf")),
    "tier_vxe": Unit((Z15,), ("vmaeb", "vmaob", "vsumh", "vlrepf", "vfmsb")),
}
# A tile's accumulators live in registers: no vector is loaded from, or stored to, the stack.
TILE = re.compile(r"<\S*VxKernel4tile\S*>:$")
SPILL = re.compile(r"^v(l|st)\s.*\(%r15\)")
ALLOWED_LIBRARIES = re.compile(r"^(libc\.so|libm\.so|libgcc_s\.so|ld64\.so|libc\.musl)")


def _run(command: str, *arguments: str) -> str:
    return subprocess.run((BINUTILS + command, *arguments), check=True, capture_output=True, text=True).stdout


def _faults_of_code(path: Path, unit: Unit) -> Iterator[str]:
    seen: set[str] = set()
    in_tile = False
    for line in _run("objdump", "-d", "--no-show-raw-insn", str(path)).splitlines():
        if line.endswith(">:"):
            in_tile = bool(TILE.search(line))
        if not (match := re.match(r"\s*[0-9a-f]+:\s+(\S+)\s*(.*)", line)):
            continue
        name, instruction = match[1], f"{match[1]} {match[2]}".strip()
        seen.add(name)
        if FUSED.match(name):
            yield f"{path.name}: {instruction}: the numerics contract forbids fused arithmetic"
        if any(foreign.match(name) for foreign in unit.foreign):
            yield f"{path.name}: {instruction}: not an instruction of this unit's machine"
        if in_tile and SPILL.match(instruction):
            yield f"{path.name}: {instruction}: a tile spills a vector"
    if not seen:
        yield f"{path.name}: no instructions found; is it an LTO object?"
    yield from (f"{path.name}: has no {wanted}" for wanted in unit.wanted if wanted not in seen)


def check_object(path: Path, stem: str) -> Iterator[str]:
    """Faults of one object file."""
    own = rf"int8moe_{stem}$" if stem.startswith("tier_") else r"int8moe_"  # what it may define for others
    for line in _run("nm", str(path)).splitlines():
        kind, name = line.split()[-2:]
        if kind in "wWvVu":
            yield f"{path.name}: weak or unique symbol {name}: the linker could merge it with another tier's"
        elif kind.isupper() and kind != "U" and not re.match(own, name):
            yield f"{path.name}: defines {name} for other units"
    yield from _faults_of_code(path, UNITS[stem])


def check_library(path: Path) -> Iterator[str]:
    """Faults of the shared library: foreign run-time libraries, exports beyond the C interface."""
    for name in re.findall(r"\(NEEDED\).*\[(.*)\]", _run("readelf", "-d", str(path))):
        if not ALLOWED_LIBRARIES.match(name):
            yield f"{path.name}: needs {name}; an int8moe library needs the C library only"
    for line in _run("nm", "-D", "--defined-only", str(path)).splitlines():
        name = line.split()[-1]
        if not name.startswith("int8moe_") and name not in ("_init", "_fini"):
            yield f"{path.name}: exports {name}"


def faults_of(build: Path) -> list[str]:
    """What is wrong with a build, a line each."""
    faults: list[str] = []
    for stem in UNITS:
        found = sorted(build.rglob(f"int8moe_objects.dir/**/{stem}.cpp.o"))
        if not found:
            faults.append(f"{build}: no object of {stem}.cpp")
        for path in found:
            faults += dict.fromkeys(check_object(path, stem))
    libraries = sorted(build.rglob("libint8moe_*.so"))
    if not libraries:
        faults.append(f"{build}: no libint8moe_*.so")
    for library in libraries:
        faults += check_library(library)
    return faults


def main(arguments: list[str]) -> int:
    """Check the build that is named; 0 when there is no fault."""
    if len(arguments) != 1:
        print(__doc__)
        return 2
    faults = faults_of(Path(arguments[0]))
    for fault in faults:
        print(fault)
    if not faults:
        print(f"ok: {len(UNITS)} units")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
