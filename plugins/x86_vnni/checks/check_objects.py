"""Check built objects: each tier holds its own instructions, its own copies of everything, and no fused arithmetic.

    python check_objects.py BUILD_FOLDER [LIBRARY.so]

BUILD_FOLDER is a CMake build of this plugin. Exits non-zero with one line a fault. Needs binutils.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from native_checks import Binutils, build_faults, report

BINUTILS = Binutils(("x86_64", "AMD64"))

# What the numerics contract forbids everywhere: fused multiply-add, approximations, conversions that flush denormals.
FORBIDDEN = re.compile(
    r"^v?(fmadd|fmsub|fnmadd|fnmsub|fmaddsub|fmsubadd|rcp\w*ps|rcpss|rsqrt|rcp14|rsqrt14|rcp28|rsqrt28|exp2p|"
    r"cvtne2?ps2bf16|cvtneps2bf16|dpbf16ps|pmaddubsw)"
)
AVX = re.compile(r"%[yz]mm|%k[0-7]\b")
OPMASK = re.compile(r"%k[0-7]\b")
BEYOND_AVX512_VNNI = re.compile(
    r"^(tdp|tile|ldtilecfg|sttilecfg|t2rpntlvw|vp2intersect)|^v\w+ph\b|^vdpbf16|^vpdpb(ss|su|uu)"
)
TILES = re.compile(r"^(ldtilecfg|tilezero|tileloadd|tilestored|tilerelease|tdpbsud)$")


class Instruction(NamedTuple):
    """One line of a disassembly; ``evex`` where it is encoded as AVX-512 is."""

    name: str
    operands: str
    evex: bool

    def __str__(self) -> str:
        return f"{self.name} {self.operands}".strip()


def _beyond_baseline(i: Instruction) -> bool:
    return i.name.startswith("v") or bool(AVX.search(i.operands))


def _beyond_avx2(i: Instruction) -> bool:
    return i.evex or bool(OPMASK.search(i.operands)) or i.name.startswith("vpdp")


def _beyond_avx_vnni(i: Instruction) -> bool:
    return _beyond_avx2(i) and (i.name != "vpdpbusd" or i.evex)


def _beyond_avx512_vnni(i: Instruction) -> bool:
    return bool(BEYOND_AVX512_VNNI.search(i.name))


def _beyond_amx_int8(i: Instruction) -> bool:
    return not TILES.search(i.name) and _beyond_avx512_vnni(i)


# object's stem: is this instruction foreign to it? A tier also has to contain what it is named after.
UNITS = {
    "dispatcher": (_beyond_baseline, None),
    "tier_avx2": (_beyond_avx2, "vpmaddwd"),
    "tier_avx_vnni": (_beyond_avx_vnni, "vpdpbusd"),
    "tier_avx512_vnni": (_beyond_avx512_vnni, "vpdpbusd"),
    "tier_amx_int8": (_beyond_amx_int8, "tdpbsud"),
}


def _instructions(path: Path) -> Iterator[Instruction]:
    prefixes = r"(?:\{\w+\}\s+)?(?:(?:lock|rep\w*|data16|cs|bnd|notrack)\s+)*"
    line_form = re.compile(rf"\s*[0-9a-f]+:\t((?:[0-9a-f]{{2}} )+)\s*\t{prefixes}(\S+)\s*(.*)")
    for line in BINUTILS.run("objdump", "-d", "--insn-width=16", str(path)).splitlines():
        if match := line_form.match(line):
            yield Instruction(
                match[2], match[3], evex=match[1].startswith("62 ")
            )  # in 64-bit code nothing else begins so


def check_object(path: Path, stem: str) -> Iterator[str]:
    """Faults of one object file."""
    foreign, wanted = UNITS[stem]
    yield from BINUTILS.symbol_faults(path, stem)
    seen = set()
    for instruction in _instructions(path):
        seen.add(instruction.name)
        if FORBIDDEN.match(instruction.name):
            yield f"{path.name}: {instruction}: the numerics contract forbids it"
        if foreign(instruction):
            yield f"{path.name}: {instruction}: not an instruction of this unit's set"
    if not seen:
        yield f"{path.name}: no instructions found; is it an LTO object?"
    elif wanted is not None and wanted not in seen:
        yield f"{path.name}: has no {wanted}"


def check_library(path: Path) -> Iterator[str]:
    """Faults of the shared library: foreign run-time libraries, exports beyond the C interface."""
    return BINUTILS.library_faults(path)


def main(arguments: list[str]) -> int:
    """Check what the arguments name; 0 when there is no fault."""
    if not arguments:
        print(__doc__)
        return 2
    build = Path(arguments[0])
    libraries = [Path(a) for a in arguments[1:]] or sorted(build.rglob("libint8moe_*.so"))
    faults = build_faults(build, UNITS, check_object, check_library, libraries)
    return report(faults, f"{len(UNITS)} units, {', '.join(str(library) for library in libraries)}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
