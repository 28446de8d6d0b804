"""This plugin's shared library and layout. Imports no torch."""

from __future__ import annotations

import ctypes

from int8moe.contracts import WeightLayout
from int8moe.native import NativeLibrary

LIBRARY = NativeLibrary(
    package="int8moe_s390x_vxe",
    file_name="libint8moe_s390x_vxe.so",
    distribution="int8moe-s390x-vxe",
    machines=("s390x",),
    functions={"int8moe_s390x_probe": (ctypes.c_int32, [ctypes.c_void_p])},
)
LAYOUT = WeightLayout(namespace="s390x_vxe", name="i8_n16k4")
