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

# What the numerics contract forbids everywhere: fused multiply-add, approximations, conversions that flush denormals.
FORBIDDEN = re.compile(
    r"^v?(fmadd|fmsub|fnmadd|fnmsub|fmaddsub|fmsubadd|rcp\w*ps|rcpss|rsqrt|rcp14|rsqrt14|rcp28|rsqrt28|exp2p|"
    r"cvtne2?ps2bf16|cvtneps2bf16|dpbf16ps|pmaddubsw)"
)
AVX512_ONLY = re.compile(r"%zmm|%[xyz]mm(1[6-9]|2\d|3[01])\b|%k[0-7]\b|\{(evex|[zu]|1to\d+)\}")
AVX = re.compile(r"%[yz]mm|%k[0-7]\b")
BEYOND_AVX512_VNNI = re.compile(r"^(tdp|tile|ldtilecfg|sttilecfg|vp2intersect)|^v\w+ph\b|^vdpbf16")
ALLOWED_LIBRARIES = re.compile(r"^(libc\.so|libm\.so|libgcc_s\.so|ld-linux|libc\.musl)")

# object's stem: (is this instruction foreign to it?, the only symbols that it may define for others)
UNITS = {
    "dispatcher": (lambda name, operands: name.startswith("v") or AVX.search(operands), r"int8moe_"),
    "tier_avx2": (
        lambda name, operands: AVX512_ONLY.search(operands) or name.startswith("vpdp"),
        r"int8moe_tier_avx2$",
    ),
    "tier_avx512_vnni": (
        lambda name, operands: BEYOND_AVX512_VNNI.search(name),
        r"int8moe_tier_avx512_vnni$",
    ),
}


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _instructions(path: Path) -> Iterator[tuple[str, str]]:
    for line in _run("objdump", "-d", "--no-show-raw-insn", str(path)).splitlines():
        match = re.match(
            r"\s*[0-9a-f]+:\t(?:\{\w+\}\s+)?(?:(?:lock|rep\w*|data16|cs|bnd|notrack)\s+)*(\S+)\s*(.*)", line
        )
        if match:
            yield match[1], match[2]


def check_object(path: Path, stem: str) -> Iterator[str]:
    """Faults of one object file."""
    foreign, own = UNITS[stem]
    for line in _run("nm", str(path)).splitlines():
        kind, name = line.split()[-2:]
        if kind in "wWvVu":
            yield f"{path.name}: weak or unique symbol {name}: the linker could merge it with another tier's"
        elif kind.isupper() and kind != "U" and not re.match(own, name):
            yield f"{path.name}: defines {name} for other units"
    count = 0
    for name, operands in _instructions(path):
        count += 1
        if FORBIDDEN.match(name):
            yield f"{path.name}: {name} {operands}: the numerics contract forbids it"
        if foreign(name, operands):
            yield f"{path.name}: {name} {operands}: not an instruction of this unit's set"
    if not count:
        yield f"{path.name}: no instructions found; is it an LTO object?"


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
