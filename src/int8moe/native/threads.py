"""Hands torch's threads to native libraries, and takes them back in the child of a fork."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from pathlib import Path

import torch

from ..host import forked_with_threads
from .library import NativeLibrary

logger = logging.getLogger("int8moe.native")

_lock = threading.Lock()
_attached: list[ctypes.CDLL] = []


def torch_threads() -> tuple[int | None, int | None]:
    """Addresses of torch's parallel_for and thread count; (None, None) where this torch has none."""
    folder = Path(torch.__file__).parent / "lib"
    for name in (None, str(folder / "libtorch_cpu.so"), str(folder / "libtorch_cpu.dylib")):
        try:
            symbols = ctypes.CDLL(name)
            run, count = (
                ctypes.cast(symbols[symbol], ctypes.c_void_p).value
                for symbol in ("torch_parallel_for", "torch_get_num_threads")
            )
        except (OSError, AttributeError):
            continue
        return run, count
    logger.warning(
        "torch %s has no torch_parallel_for: native kernels run on one thread; torch 2.10 or newer has it",
        torch.__version__,
    )
    return None, None


def attach(library: NativeLibrary) -> ctypes.CDLL:
    """The loaded library, with torch's threads handed in; once per process."""
    with _lock:
        loaded = library.load()
        if not any(loaded is other for other in _attached):
            if not _attached:
                os.register_at_fork(after_in_child=_after_fork)
            loaded.int8moe_set_parallel(*torch_threads())
            _attached.append(loaded)
        return loaded


def _after_fork() -> None:
    """In the child: forget the scratch lists, and run serially where torch's pool did not survive."""
    global _lock
    _lock = threading.Lock()  # the thread that held it may not be there
    for library in _attached:
        library.int8moe_after_fork()
        if not forked_with_threads():
            library.int8moe_set_parallel(*torch_threads())
