"""Finds and loads the native library, and states its C interface. Imports no torch."""

from __future__ import annotations

import ctypes
import platform
import struct
import sys
from pathlib import Path

from . import __path__ as _package_path

DRIVER_VERSION = 2
NUMERICS_VERSION = 1
"""INT8MOE_DRIVER_VERSION and INT8MOE_NUMERICS_VERSION that the structs below were written for."""
LAYOUT_NAME, LAYOUT_VERSION = "s8_n8k8", 1

LIBRARY_NAME = "libint8moe_aarch64_neon" + (".dylib" if sys.platform == "darwin" else ".so")
MACHINES = ("aarch64", "arm64", "ARM64")

# int8moe_layer: see int8moe/abi.h.
LAYER = struct.Struct("@IIii qqqq PqPq PPPPP ffii")
# int8moe_call.
CALL = struct.Struct("@Ii qq Pqq Pqq Pqq P iiii")
# int8moe_rows_call.
ROWS_CALL = struct.Struct("@Ii q Pqq Pq Pq P ii")
# int8moe_pack_call.
PACK_CALL = struct.Struct("@Ii Pqqqqq")
# int8moe_aarch64_facts: struct_bytes, reserved, hwcap, hwcap2.
FACTS = struct.Struct("@II QQ")

F32, BF16, F16, I8, I32, I64 = range(6)


class LibraryUnavailable(Exception):
    """Why the native library cannot be used; the text is shown to people."""


_loaded: ctypes.CDLL | None = None


def find_library() -> Path | None:
    """The library beside this package's files; an editable install has it in another folder of ``__path__``."""
    for folder in _package_path:
        candidate = Path(folder) / LIBRARY_NAME
        if candidate.is_file():
            return candidate
    return None


def load_library(path: Path | None = None) -> ctypes.CDLL:
    """Load the library once, or raise LibraryUnavailable with the reason."""
    global _loaded
    if path is None and _loaded is not None:
        return _loaded
    machine = platform.machine()
    if machine not in MACHINES:
        raise LibraryUnavailable(f"machine is {machine}")
    where = find_library() if path is None else path
    if where is None:
        raise LibraryUnavailable(
            f"{LIBRARY_NAME} is missing: this install was built without native code; reinstall int8moe-aarch64-neon"
        )
    try:
        library = ctypes.CDLL(str(where))
    except OSError as error:
        raise LibraryUnavailable(f"{LIBRARY_NAME} does not load: {error}") from None
    _check_version(library)
    _declare(library)
    if path is None:
        _loaded = library
    return library


def _check_version(library: ctypes.CDLL) -> None:
    try:
        version = library.int8moe_driver_version()
    except AttributeError:
        raise LibraryUnavailable(
            f"{LIBRARY_NAME} does not export int8moe_driver_version; reinstall int8moe-aarch64-neon"
        ) from None
    if version != DRIVER_VERSION:
        raise LibraryUnavailable(
            f"{LIBRARY_NAME} has driver version {version}, this package needs {DRIVER_VERSION}; "
            "reinstall int8moe-aarch64-neon"
        )
    numerics = library.int8moe_numerics_version()
    if numerics != NUMERICS_VERSION:
        raise LibraryUnavailable(
            f"{LIBRARY_NAME} computes numerics version {numerics}, this package declares {NUMERICS_VERSION}; "
            "reinstall int8moe-aarch64-neon"
        )


def _declare(library: ctypes.CDLL) -> None:
    pointer, i32, i64, text = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_char_p
    signatures = {
        "int8moe_numerics_version": (i32, []),
        "int8moe_tier_count": (i32, []),
        "int8moe_tier_name": (text, [i32]),
        "int8moe_status_text": (text, [i32]),
        "int8moe_set_parallel": (None, [pointer, pointer]),
        "int8moe_after_fork": (None, []),
        "int8moe_set_scratch_limit": (None, [i64]),
        "int8moe_scratch_bytes": (i64, []),
        "int8moe_release_scratch": (None, []),
        "int8moe_packed_bytes": (i64, [i64, i64, i64]),
        # bytes objects made by the Structs above stand in for const pointers to structs.
        "int8moe_pack": (i32, [text]),
        "int8moe_unpack": (i32, [text]),
        "int8moe_forward": (i32, [text, text]),
        "int8moe_forward_rows": (i32, [text, text]),
        "int8moe_run_peak": (i64, [i32, i32, i64]),
        "int8moe_read_memory": (i32, [i32, i32, pointer, i64]),
        "int8moe_aarch64_probe": (i32, [pointer]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments


NOT_BUILT = (
    "this install was built without it: its compiler was too old; "
    "reinstall int8moe-aarch64-neon with gcc 10, clang 11 or newer"
)


def built_tiers(library: ctypes.CDLL) -> tuple[str, ...]:
    """The tiers that the library holds, in the order of its table."""
    return tuple(library.int8moe_tier_name(index).decode() for index in range(library.int8moe_tier_count()))


def tier_index(library: ctypes.CDLL, tier: str) -> int:
    """Position of a tier in the library's table."""
    tiers = built_tiers(library)
    if tier not in tiers:
        raise LibraryUnavailable(f"{LIBRARY_NAME} has no tier {tier}: {NOT_BUILT}")
    return tiers.index(tier)


def check(library: ctypes.CDLL, status: int, what: str) -> None:
    """Raise when a native call did not return 0."""
    if status:
        text = library.int8moe_status_text(status).decode()
        raise (MemoryError if status == 4 else RuntimeError)(f"{what}: {text} (status {status})")
