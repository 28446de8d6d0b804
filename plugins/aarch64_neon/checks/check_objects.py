"""Check built objects: each tier holds its own instructions, its own copies of everything, and no fused arithmetic.

    python check_objects.py BUILD_FOLDER [LIBRARY.so]

BUILD_FOLDER is a CMake build of this plugin, also one that was cross-compiled. Exits non-zero with one line a fault.
Needs binutils that know AArch64.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PREFIX = "" if platform.machine() in ("aarch64", "arm64") else "aarch64-linux-gnu-"

# What the numerics contract forbids everywhere: fused multiply-add, approximations, bf16 arithmetic.
FORBIDDEN = re.compile(r"^(fn?m(add|sub)|fml[as]l?2?|frecp[esx]|frsqrt[es]|bf(cvt|dot|mmla|mlal)\w*|fcmla)$")
DOT_PRODUCTS = {"sdot", "udot"}
MATRICES = {"smmla", "ummla", "usmmla", "usdot", "sudot"}
# Of Armv8.1 and 8.2, which the compiler may use where it is told of a dot product; the probe asks for the atomics.
ATOMICS = re.compile(r"^(ld(add|clr|eor|set|[su]max|[su]min)|st(add|clr|eor|set)|swp|casp?)(a|l|al)?[bh]?$")
UNPROBED = re.compile(r"^(sqrdml[as]h|crc32\w+|f\w+\s.*\.[48]h|sha\w+|aes\w+|pac\w+|aut\w+)$")
SCALABLE = re.compile(r"\b[zp]\d+\.[bhsdq]\b|\bp\d+/[mz]\b")

# object's stem: (foreign instructions, those that it has to contain, whether it may use the atomics)
UNITS: dict[str, tuple[set[str], set[str], bool]] = {
    "dispatcher": (DOT_PRODUCTS | MATRICES, set(), False),
    "tier_neon": (DOT_PRODUCTS | MATRICES, {"smull", "smull2", "sadalp"}, False),
    "tier_dotprod": (MATRICES, {"sdot"}, True),
    "tier_i8mm": (DOT_PRODUCTS, {"smmla"}, True),
}
ALLOWED_LIBRARIES = re.compile(r"^(libc\.so|libm\.so|libgcc_s\.so|ld-linux|libc\.musl)")
# Of the compiler's own run-time library, linked in statically: atomics that ask the processor first.
OUTLINED = re.compile(r"^__aarch64_")


def _run(tool: str, *arguments: str) -> str:
    return subprocess.run([PREFIX + tool, *arguments], check=True, capture_output=True, text=True).stdout


def _instructions(path: Path) -> Iterator[tuple[str, str]]:
    for line in _run("objdump", "-d", str(path)).splitlines():
        if match := re.match(r"\s*[0-9a-f]+:\t[0-9a-f]{8} \t(\S+)\s*(.*)", line):
            yield match[1], match[2].partition("//")[0].strip()


def check_object(path: Path, stem: str) -> Iterator[str]:
    """Faults of one object file."""
    foreign, wanted, atomics = UNITS[stem]
    own = rf"int8moe_{stem}$" if stem.startswith("tier_") else r"int8moe_"  # what it may define for others
    for line in _run("nm", str(path)).splitlines():
        kind, name = line.split()[-2:]
        if kind in "wWvVu":
            yield f"{path.name}: weak or unique symbol {name}: the linker could merge it with another tier's"
        elif kind.isupper() and kind != "U" and not re.match(own, name):
            yield f"{path.name}: defines {name} for other units"
    seen = set()
    for name, operands in _instructions(path):
        seen.add(name)
        text = f"{name} {operands}".strip()
        if FORBIDDEN.match(name):
            yield f"{path.name}: {text}: the numerics contract forbids it"
        strange = name in foreign or UNPROBED.match(name) or SCALABLE.search(operands)
        if strange or (ATOMICS.match(name) and not atomics):
            yield f"{path.name}: {text}: not an instruction of this unit's set"
    if not seen:
        yield f"{path.name}: no instructions found; is it an LTO object?"
    for name in sorted(wanted - seen):
        yield f"{path.name}: has no {name}"


def check_library(path: Path) -> Iterator[str]:
    """Faults of the shared library: foreign run-time libraries, exports beyond the C interface."""
    for name in re.findall(r"\(NEEDED\).*\[(.*)\]", _run("readelf", "-d", str(path))):
        if not ALLOWED_LIBRARIES.match(name):
            yield f"{path.name}: needs {name}; an int8moe library needs the C library only"
    for line in _run("nm", "-D", "--defined-only", str(path)).splitlines():
        name = line.split()[-1]
        if not name.startswith("int8moe_") and name not in ("_init", "_fini") and not OUTLINED.match(name):
            yield f"{path.name}: exports {name}"


def main(arguments: list[str]) -> int:
    """Check what the arguments name; 0 when there is no fault."""
    if not arguments:
        print(__doc__)
        return 2
    if shutil.which(PREFIX + "objdump") is None:
        print(f"{PREFIX}objdump is not installed: install binutils for AArch64")
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
