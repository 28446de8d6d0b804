"""Check built objects: each tier holds its own instructions, its own copies of everything, and no fused arithmetic.

    python check_objects.py BUILD_FOLDER [LIBRARY.so]

BUILD_FOLDER is a CMake build of this plugin, also one that was cross-compiled. Exits non-zero with one line a fault.
Needs binutils that know AArch64.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from native_checks import Binutils, build_faults, report

BINUTILS = Binutils(("aarch64", "arm64"), "aarch64-linux-gnu-")

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
# Of the compiler's own run-time library, linked in statically: atomics that ask the processor first.
OUTLINED = re.compile(r"^__aarch64_")


def _instructions(path: Path) -> Iterator[tuple[str, str]]:
    for line in BINUTILS.run("objdump", "-d", str(path)).splitlines():
        if match := re.match(r"\s*[0-9a-f]+:\t[0-9a-f]{8} \t(\S+)\s*(.*)", line):
            yield match[1], match[2].partition("//")[0].strip()


def check_object(path: Path, stem: str) -> Iterator[str]:
    """Faults of one object file."""
    foreign, wanted, atomics = UNITS[stem]
    yield from BINUTILS.symbol_faults(path, stem)
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
    return BINUTILS.library_faults(path, OUTLINED)


def main(arguments: list[str]) -> int:
    """Check what the arguments name; 0 when there is no fault."""
    if not arguments:
        print(__doc__)
        return 2
    if shutil.which(BINUTILS.prefix + "objdump") is None:
        print(f"{BINUTILS.prefix}objdump is not installed: install binutils for AArch64")
        return 2
    build = Path(arguments[0])
    libraries = [Path(a) for a in arguments[1:]] or sorted(build.rglob("libint8moe_*.so"))
    faults = build_faults(build, UNITS, check_object, check_library, libraries)
    return report(faults, f"{len(UNITS)} units, {', '.join(str(library) for library in libraries)}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
