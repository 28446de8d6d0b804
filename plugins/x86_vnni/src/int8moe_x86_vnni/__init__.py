"""INT8 fused experts for x86-64: tiers avx2 and avx512_vnni of one layout, ``u8_n16k4``."""
