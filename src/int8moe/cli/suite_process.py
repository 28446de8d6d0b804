"""The process that ``int8moe verify`` starts: runs the suite and reports each group as one JSON line.

``python -m int8moe.cli.suite_process KERNEL GRID [GROUP ...]``. The first line holds the names of all groups that
there are, the last one the totals. What a kernel's library prints on stdout goes to stderr, so the lines stay clean.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any


def main(arguments: Sequence[str]) -> int:
    """Run the groups that are named, or all."""
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def report(document: Any) -> None:
        lines.write(json.dumps(document) + "\n")
        lines.flush()

    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    from ..testing.case import GRIDS
    from ..testing.groups import GROUPS
    from ..testing.runner import run_kernel

    kernel, grid, *names = arguments
    report(list(GROUPS))
    if set(names) - set(GROUPS):
        return 2
    result = run_kernel(kernel, grid=GRIDS[GRIDS.index(grid)], groups=names or None, progress=report)
    report({"numerics": result["numerics"], "comparisons": result["comparisons"]})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
