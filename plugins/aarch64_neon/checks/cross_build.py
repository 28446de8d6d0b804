"""Build the plugin's wheel for Linux on AArch64 on a machine of another kind.

    python cross_build.py FOLDER

Needs the cross compiler aarch64-linux-gnu-g++; its glibc decides the tag, manylinux_2_17 with gcc 12's.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

PLUGIN = Path(__file__).resolve().parent.parent
COMPILERS = {"CMAKE_C_COMPILER": "aarch64-linux-gnu-gcc", "CMAKE_CXX_COMPILER": "aarch64-linux-gnu-g++"}


def main(arguments: list[str]) -> int:
    """Build into the folder that is named; 2 where a compiler is missing."""
    if len(arguments) != 1:
        print(__doc__)
        return 2
    missing = [name for name in COMPILERS.values() if shutil.which(name) is None]
    if missing:
        print(f"{', '.join(missing)}: not installed; apt-get install g++-aarch64-linux-gnu", file=sys.stderr)
        return 2
    options = {"CMAKE_SYSTEM_NAME": "Linux", "CMAKE_SYSTEM_PROCESSOR": "aarch64", **COMPILERS}
    environment = {
        **os.environ,
        "_PYTHON_HOST_PLATFORM": "linux-aarch64",  # what the wheel's tag is made of
        "CMAKE_ARGS": " ".join(f"-D{name}={value}" for name, value in options.items()),
    }
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", arguments[0], str(PLUGIN)]
    return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
