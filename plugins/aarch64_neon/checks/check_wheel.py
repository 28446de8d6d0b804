"""Check a built wheel: one library, which needs the C library alone and no newer one than the wheel's tag promises.

    python check_wheel.py WHEEL

Exits non-zero with one line a fault. Needs binutils that know AArch64; auditwheel, where it is installed, judges the
tag.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from check_objects import check_library

TAG = "manylinux_2_17_aarch64"


def faults_of(wheel: Path) -> Iterator[str]:
    """What is wrong with the wheel, a line each."""
    if "-py3-none-" not in wheel.name:
        yield f"{wheel.name}: is bound to one Python; py3-none is wanted"
    if "aarch64" not in wheel.name.rpartition("-")[2]:
        yield f"{wheel.name}: is no wheel for AArch64"
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
        names = archive.namelist()
        libraries = [name for name in names if ".so" in Path(name).name]
        if libraries != ["int8moe_aarch64_neon/libint8moe_aarch64_neon.so"]:
            yield f"{wheel.name}: holds the libraries {libraries or 'none'}; libint8moe_aarch64_neon.so alone is wanted"
        for name in libraries:
            yield from check_library(Path(folder, name))
    if importlib.util.find_spec("auditwheel") is not None:
        audit = subprocess.run(
            [sys.executable, "-m", "auditwheel", "show", str(wheel)], capture_output=True, text=True, check=False
        )
        if f'"{TAG}"' not in " ".join(audit.stdout.split()):
            found = audit.stdout.strip() or audit.stderr.strip()
            yield f"{wheel.name}: auditwheel does not find it fit for {TAG}: {found}"


def main(arguments: list[str]) -> int:
    """Check the wheel that is named; 0 when there is no fault."""
    if len(arguments) != 1:
        print(__doc__)
        return 2
    faults = list(faults_of(Path(arguments[0])))
    for fault in faults:
        print(fault)
    if not faults:
        print(f"ok: {Path(arguments[0]).name}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
