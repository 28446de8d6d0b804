"""Names of a layer's tensors, and the states that it goes through. Imports no torch."""

from __future__ import annotations

EMPTY, LOADED, PACKED = "empty", "loaded", "packed"

WEIGHTS = ("w13_weight", "w2_weight")
SCALES_AND_BIASES = ("w13_weight_scale", "w13_bias", "w2_weight_scale", "w2_bias")
PARAMETERS = ("w13_weight", "w13_weight_scale", "w13_bias", "w2_weight", "w2_weight_scale", "w2_bias")
