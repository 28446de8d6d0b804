"""The tiers of this plugin: they share library, layout and hooks, and differ in one name."""

from __future__ import annotations

from int8moe.native.experts import NativeExperts

from .library import LAYOUT, LIBRARY


class X86Experts(NativeExperts):
    """What the tiers share."""

    library = LIBRARY
    layout = LAYOUT


class Avx2Experts(X86Experts):
    """``x86_vnni.avx2``."""

    tier = "avx2"


class AvxVnniExperts(X86Experts):
    """``x86_vnni.avx_vnni``."""

    tier = "avx_vnni"


class Avx512VnniExperts(X86Experts):
    """``x86_vnni.avx512_vnni``."""

    tier = "avx512_vnni"


class AmxInt8Experts(X86Experts):
    """``x86_vnni.amx_int8``; the permission for AMX is asked for where the kernel is declared, in plugin.py."""

    tier = "amx_int8"
