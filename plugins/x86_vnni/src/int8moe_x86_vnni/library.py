"""This plugin's shared library and layout. Imports no torch."""

from __future__ import annotations

import ctypes

from int8moe.contracts import WeightLayout
from int8moe.native import NativeLibrary

LIBRARY = NativeLibrary(
    package="int8moe_x86_vnni",
    file_name="libint8moe_x86_vnni.so",
    distribution="int8moe-x86-vnni",
    machines=("x86_64", "AMD64", "amd64"),
    functions={"int8moe_x86_probe": (ctypes.c_int32, [ctypes.c_void_p, ctypes.c_int32])},
    compilers="gcc 11, clang 12 or newer",
)
LAYOUT = WeightLayout(namespace="x86_vnni", name="u8_n16k4")
