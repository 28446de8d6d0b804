"""What is done in a process of its own, because it runs code that may end the process, hang or print.

:mod:`.probe_process` and :mod:`.child_probe` start ``main([PROBE, SECONDS, ARGUMENT ...])`` with files as stdout and
stderr. Each report is one line of stdout (:mod:`.outcome`); what other code prints there goes to stderr.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..host_memory import huge_bytes
from .child_probe import run_in_child
from .huge_pages import BUFFER_BYTES
from .mapped_libraries import mapped_libraries
from .outcome import report_line

Report = Callable[[str, Any], None]


def main(arguments: Sequence[str]) -> int:
    """Run one probe: its name, the seconds that it may take, what it takes.

    When these are over stderr gets the stack of each thread, to show what hangs.
    """
    name, seconds, *rest = arguments
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)
    faulthandler.enable()
    faulthandler.dump_traceback_later(float(seconds))
    logger = logging.getLogger("int8moe")  # what it has to say becomes findings
    logger.addHandler(logging.NullHandler())
    logger.propagate = False

    def report(kind: str, document: Any) -> None:
        lines.write(report_line(kind, document))
        lines.flush()

    PROBES[name](report, *rest)
    sys.stdout = sys.stderr
    return 0


def _probe_discovery(report: Report) -> None:
    """Load every plugin, and report before each of them whose code runs next. Imports no torch."""
    from .. import environment
    from ..errors import ConfigError, NoKernelError
    from ..host import this_host
    from ..registry import get_registry, hints
    from ..selection import check_max_isa, machine_policy, machine_refusal

    registry = get_registry()
    registry.on_loading = lambda record: report("loading", [record.name, record.distribution])
    plugins, candidates = registry.plugins(), registry.candidates()
    policy = machine_policy()
    try:
        check_max_isa(policy.max_isa, candidates)
    except ConfigError as error:
        report("max_isa_fault", str(error))
    if pinned := environment.text("INT8MOE_KERNEL"):
        try:
            registry.find(pinned)
        except NoKernelError as error:
            report("pinned_fault", str(error))
    report(
        "kernels",
        [
            {
                "name": candidate.spec.name,
                "distribution": candidate.distribution,
                "device": candidate.spec.device,
                "isa": candidate.spec.isa,
                "priority": candidate.spec.priority,
                "unavailable": candidate.spec.unavailable,
                "refusal": machine_refusal(candidate, this_host(), policy),
            }
            for candidate in candidates
        ],
    )
    report("hints", hints())
    fields = ("name", "distribution", "version", "value", "state", "error", "traceback")
    report(
        "plugins",
        [{**{key: getattr(row, key) for key in fields}, "num_kernels": len(row.kernels)} for row in plugins],
    )


def _probe_torch(report: Report, importing: str, seconds: str, *kernels: str) -> None:
    """Import torch; in children of this process, measure it, and let each of the kernels test itself.

    ``importing`` are the seconds for the import, ``seconds`` those for each child.
    """
    before = _num_cpus()
    faulthandler.dump_traceback_later(float(importing), exit=True)  # the process as a whole may take longer
    try:
        with _without_blas_threads():
            import torch
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        report("failed", _described(error))
        return
    faulthandler.cancel_dump_traceback_later()  # its thread is one that the children would lose, too
    folder = Path(torch.__file__).parent
    report(
        "torch",
        {
            "version": str(torch.__version__),
            "cuda": torch.version.cuda,
            "folder": str(folder),
            "has_parallel_for": _has_parallel_for(folder),
        },
    )
    report("libraries", mapped_libraries())
    report("measured", run_in_child("torch-measures", float(seconds), str(before)))
    if kernels:
        from .. import binding  # noqa: F401  # once for all children
    for kernel in kernels:
        report("self-test", [kernel, run_in_child("self-test", float(seconds), kernel)])


def _probe_torch_measures(report: Report, cpus_before: str) -> None:
    """Torch's threads, the CPUs that its OpenMP runtime leaves to this thread, and huge pages for one buffer."""
    import torch

    torch.ones(1 << 20).add_(1)  # a first parallel region
    report(
        "threads",
        {"torch": torch.get_num_threads(), "cpus_before": int(cpus_before), "cpus_after": _num_cpus()},
    )
    from ..storage import allocate_bytes

    buffer = allocate_bytes(BUFFER_BYTES, torch.device("cpu")).fill_(1)
    report("huge_bytes", huge_bytes(buffer.data_ptr(), BUFFER_BYTES))


def _probe_self_test(report: Report, kernel: str) -> None:
    """Bind one kernel: its class is loaded, its hooks are checked, and it has to give a known answer."""
    from ..binding import bind
    from ..host import forked_with_threads

    began = time.monotonic()
    try:
        bound = bind(kernel)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        report("failed", _described(error))
    else:
        seconds, serial = time.monotonic() - began, forked_with_threads()
        report("passed", {"was_tested": bound.layout is not None, "seconds": seconds, "was_serial": serial})
    report("libraries", mapped_libraries())


def _probe_native_libraries(report: Report, *paths: str) -> None:
    """Open each shared library, and ask those that are built on the kernel driver for their versions."""
    for path in paths:
        report("opening", path)
        error = ""
        try:
            library = _opened(path)
        except OSError as fault:
            library, error = None, " ".join(str(fault).split())
        versions = [getattr(library, f"int8moe_{what}_version", None) for what in ("driver", "numerics")]
        driver, numerics = (int(version()) if version is not None else None for version in versions)
        report("opened", {"path": path, "error": error, "driver": driver, "numerics": numerics})


def _opened(path: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(path)
    except OSError:
        import torch  # noqa: F401  # a library that is linked against torch's finds them once torch has loaded them

        return ctypes.CDLL(path)


@contextlib.contextmanager
def _without_blas_threads() -> Iterator[None]:
    """Torch imports numpy where it is installed, whose BLAS starts threads: children of a fork would run serially."""
    name = "OPENBLAS_NUM_THREADS"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def _num_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def _has_parallel_for(folder: Path) -> bool:
    """Whether this torch has the C symbol by which native kernels run on its threads."""
    for name in (None, *(str(path) for path in sorted((folder / "lib").glob("*torch_cpu.*")))):
        try:
            ctypes.CDLL(name).torch_parallel_for  # noqa: B018
        except (OSError, AttributeError, TypeError):
            continue
        return True
    return False


def _described(error: BaseException) -> dict[str, str]:
    from ..cli.app import error_line
    from ..errors import Int8MoEError

    text = error_line(error)
    kind = type(error).__name__
    named = text if isinstance(error, Int8MoEError) or text == kind else f"{kind}: {text}"
    try:
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    except Exception:  # foreign code makes its texts
        trace = kind
    return {"text": named, "traceback": trace}


PROBES: dict[str, Callable[..., None]] = {
    "discovery": _probe_discovery,
    "torch": _probe_torch,
    "torch-measures": _probe_torch_measures,
    "self-test": _probe_self_test,
    "native-libraries": _probe_native_libraries,
}
