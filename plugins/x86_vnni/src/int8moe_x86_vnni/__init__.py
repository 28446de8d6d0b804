"""INT8 fused experts for x86-64: tiers avx2, avx_vnni, avx512_vnni and amx_int8 of one layout, ``u8_n16k4``."""
