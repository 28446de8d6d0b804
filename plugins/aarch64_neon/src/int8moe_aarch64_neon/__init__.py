"""INT8 fused experts for AArch64: tiers neon, dotprod and i8mm of one layout, ``s8_n8k8``."""
