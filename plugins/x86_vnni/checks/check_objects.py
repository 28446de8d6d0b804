"""Check built objects: each tier holds its own instructions, its own copies of everything, and no fused arithmetic.

    python check_objects.py BUILD_FOLDER [LIBRARY.so]

BUILD_FOLDER is a CMake build of this plugin. Exits non-zero with one line a fault. Needs binutils.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

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
ALLOWED_LIBRARIES = re.compile(r"^(libc\.so|libm\.so|libgcc_s\.so|ld-linux|libc\.musl)")


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


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _instructions(path: Path) -> Iterator[Instruction]:
    prefixes = r"(?:\{\w+\}\s+)?(?:(?:lock|rep\w*|data16|cs|bnd|notrack)\s+)*"
    line_form = re.compile(rf"\s*[0-9a-f]+:\t((?:[0-9a-f]{{2}} )+)\s*\t{prefixes}(\S+)\s*(.*)")
    for line in _run("objdump", "-d", "--insn-width=16", str(path)).splitlines():
        if match := line_form.match(line):
            yield Instruction(
                match[2], match[3], evex=match[1].startswith("62 ")
            )  # in 64-bit code nothing else begins so


def check_object(path: Path, stem: str) -> Iterator[str]:
    """Faults of one object file."""
    foreign, wanted = UNITS[stem]
    own = rf"int8moe_{stem}$" if stem.startswith("tier_") else r"int8moe_"  # what it may define for others
    for line in _run("nm", str(path)).splitlines():
        kind, name = line.split()[-2:]
        if kind in "wWvVu":
            yield f"{path.name}: weak or unique symbol {name}: the linker could merge it with another tier's"
        elif kind.isupper() and kind != "U" and not re.match(own, name):
            yield f"{path.name}: defines {name} for other units"
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
    for name in re.findall(r"\(NEEDED\).*\[(.*)\]", _run("readelf", "-d", str(path))):
        if not ALLOWED_LIBRARIES.match(name):
            yield f"{path.name}: needs {name}; an int8moe library needs the C library only"
    for line in _run("nm", "-D", "--defined-only", str(path)).splitlines():
        name = line.split()[-1]
        if not name.startswith("int8moe_") and name not in ("_init", "_fini"):
            yield f"{path.name}: exports {name}"


def main(arguments: list[str]) -> int:
    """Check what the arguments name; 0 when there is no fault."""
    if not arguments:
        print(__doc__)
        return 2
    build = Path(arguments[0])
    faults: list[str] = []
    for stem in UNITS:
        found = sorted(build.rglob(f"int8moe_objects.dir/**/{stem}.cpp.o"))
        if not found:
            faults.append(f"{build}: no object of {stem}.cpp")
        for path in found:
            faults += list(dict.fromkeys(check_object(path, stem)))
    libraries = [Path(a) for a in arguments[1:]] or sorted(build.rglob("libint8moe_*.so"))
    if not libraries:
        faults.append(f"{build}: no libint8moe_*.so")
    for library in libraries:
        faults += check_library(library)
    for fault in faults:
        print(fault)
    if not faults:
        print(f"ok: {len(UNITS)} units, {', '.join(str(library) for library in libraries)}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
