"""INT8 fused experts for s390x: tiers scalar, vx and vxe of one layout, ``i8_n16k4``."""
