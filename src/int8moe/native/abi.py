"""``int8moe/abi.h`` in Python: its structs, as bytes, and its functions. Imports no torch."""

from __future__ import annotations

import ctypes
import struct

DRIVER_VERSION = 2
"""INT8MOE_DRIVER_VERSION that the structs below were written for."""

# int8moe_layer.
LAYER = struct.Struct("@IIii qqqq PqPq PPPPP ffii")
# int8moe_call.
CALL = struct.Struct("@Ii qq Pqq Pqq Pqq P iiii")
# int8moe_rows_call.
ROWS_CALL = struct.Struct("@Ii q Pqq Pq Pq P ii")
# int8moe_pack_call.
PACK_CALL = struct.Struct("@Ii Pqqqqq")

# enum int8moe_dtype.
F32, BF16, F16, I8, I32, I64 = range(6)

# enum int8moe_status.
ERROR_MEMORY = 4

_POINTER, _I32, _I64, _TEXT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_char_p

# Name: (result, arguments). The two versions are asked for before anything else.
VERSIONS = ("int8moe_driver_version", "int8moe_numerics_version")
FUNCTIONS = {
    "int8moe_tier_count": (_I32, []),
    "int8moe_tier_name": (_TEXT, [_I32]),
    "int8moe_status_text": (_TEXT, [_I32]),
    "int8moe_set_parallel": (None, [_POINTER, _POINTER]),
    "int8moe_after_fork": (None, []),
    "int8moe_set_scratch_limit": (None, [_I64]),
    "int8moe_scratch_bytes": (_I64, []),
    "int8moe_release_scratch": (None, []),
    "int8moe_packed_bytes": (_I64, [_I64, _I64, _I64]),
    # bytes objects made by the Structs above stand in for const pointers to structs.
    "int8moe_pack": (_I32, [_TEXT]),
    "int8moe_unpack": (_I32, [_TEXT]),
    "int8moe_forward": (_I32, [_TEXT, _TEXT]),
    "int8moe_forward_rows": (_I32, [_TEXT, _TEXT]),
    "int8moe_run_peak": (_I64, [_I32, _I32, _I64]),
    "int8moe_read_memory": (_I32, [_I32, _I32, _POINTER, _I64]),
}
