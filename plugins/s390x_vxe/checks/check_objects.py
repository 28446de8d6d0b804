"""Check built objects: each unit keeps to its machine's instructions, and owns its copies of everything.

    python check_objects.py BUILD_FOLDER

BUILD_FOLDER is a CMake build of this plugin, cross-compiled or not. Exits non-zero with one line a fault. Needs the
binutils of s390x.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from native_checks import Binutils, build_faults, report

BINUTILS = Binutils(("s390x",), "s390x-linux-gnu-", loader="ld64.so")

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


def _faults_of_code(path: Path, unit: Unit) -> Iterator[str]:
    seen: set[str] = set()
    in_tile = False
    for line in BINUTILS.run("objdump", "-d", "--no-show-raw-insn", str(path)).splitlines():
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
    yield from BINUTILS.symbol_faults(path, stem)
    yield from _faults_of_code(path, UNITS[stem])


def main(arguments: list[str]) -> int:
    """Check the build that is named; 0 when there is no fault."""
    if len(arguments) != 1:
        print(__doc__)
        return 2
    faults = build_faults(Path(arguments[0]), UNITS, check_object, BINUTILS.library_faults)
    return report(faults, f"{len(UNITS)} units")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
