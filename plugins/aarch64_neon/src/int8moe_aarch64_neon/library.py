"""This plugin's shared library and layout. Imports no torch."""

from __future__ import annotations

import ctypes

from int8moe.contracts import WeightLayout
from int8moe.native import NativeLibrary

LIBRARY = NativeLibrary(
    package="int8moe_aarch64_neon",
    file_name="libint8moe_aarch64_neon.so",
    distribution="int8moe-aarch64-neon",
    machines=("aarch64", "arm64", "ARM64"),
    functions={"int8moe_aarch64_probe": (ctypes.c_int32, [ctypes.c_void_p])},
    compilers="gcc 10, clang 11 or newer",
)
LAYOUT = WeightLayout(namespace="aarch64_neon", name="s8_n8k8")
