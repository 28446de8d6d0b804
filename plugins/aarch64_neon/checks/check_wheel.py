"""Check a built wheel: one library, which needs the C library alone and no newer one than the wheel's tag promises.

    python check_wheel.py WHEEL

Exits non-zero with one line a fault. Needs binutils that know AArch64; auditwheel, where it is installed, judges the
tag.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from check_objects import check_library
from native_checks import report, wheel_faults

TAG = "manylinux_2_17_aarch64"


def faults_of(wheel: Path) -> Iterator[str]:
    """What is wrong with the wheel, a line each."""
    if "aarch64" not in wheel.name.rpartition("-")[2]:
        yield f"{wheel.name}: is no wheel for AArch64"
    yield from wheel_faults(wheel, "int8moe_aarch64_neon", check_library)
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
    wheel = Path(arguments[0])
    return report(list(faults_of(wheel)), wheel.name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
