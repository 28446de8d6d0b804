"""``python -m int8moe.testing KERNEL``: the conformance suite without pytest."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from .case import GRIDS


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m int8moe.testing", description="Run the conformance suite over one kernel."
    )
    parser.add_argument("kernel", help='name, "<namespace>.<kernel>"')
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--group", action="append", metavar="G", help="run only this group; may be repeated")
    parser.add_argument("--grid", choices=GRIDS, default="default", help="how many combinations")
    parser.add_argument("--threads", default="1,2,3", metavar="N,...", help="thread counts to repeat with (1,2,3)")
    return parser


def _threads(parser: argparse.ArgumentParser, text: str) -> tuple[int, ...]:
    try:
        counts = tuple(int(word) for word in text.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1 or max(counts) > 1024:
        parser.error(f"--threads {text!r}: give numbers from 1 to 1024, separated by commas")
    return counts


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, and return the exit status: 1 on a failure, 2 on wrong usage."""
    parser = _parser()
    options = parser.parse_args(arguments)
    counts = _threads(parser, options.threads)
    from ..errors import Int8MoEError
    from ..listing import list_kernels
    from ..registry import get_registry
    from .groups import GROUPS
    from .runner import format_group, format_result, header, passed, run_kernel

    for name in options.group or ():
        if name not in GROUPS:
            parser.error(f"--group {name!r}: choose from {', '.join(GROUPS)}")
    try:
        get_registry().find(options.kernel)
        for row in list_kernels():
            if row.name == options.kernel and not row.available:
                print(f"error: kernel {row.name} cannot run here: {row.reason}", file=sys.stderr)
                return 1
        if not options.json:
            print(header(), flush=True)
        result = run_kernel(
            options.kernel,
            grid=options.grid,
            groups=options.group,
            threads=counts,
            progress=None if options.json else lambda group: print(format_group(group), flush=True),
        )
    except Int8MoEError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(result) if options.json else format_result(result, with_table=False))
    return 0 if passed(result) else 1


def _quiet_main() -> int:
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


if __name__ == "__main__":
    sys.exit(_quiet_main())
