"""Check a built wheel: one library, which needs the C library alone; no run-time library is bundled.

    python check_wheel.py WHEEL

Exits non-zero with one line a fault. Needs binutils.
"""

from __future__ import annotations

import sys
from pathlib import Path

from check_objects import check_library
from native_checks import report, wheel_faults


def main(arguments: list[str]) -> int:
    """Check the wheel that is named; 0 when there is no fault."""
    if len(arguments) != 1:
        print(__doc__)
        return 2
    wheel = Path(arguments[0])
    return report(list(wheel_faults(wheel, "int8moe_x86_vnni", check_library)), wheel.name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
