"""INT8 experts in models of transformers.

After :func:`enable`, ``AutoModelForCausalLM.from_pretrained(DIR)`` loads an INT8 W8A8 mixture-of-experts
checkpoint with its experts in :class:`int8moe.FusedMoE`, and ``experts_implementation="int8moe"`` quantises the
experts of a float checkpoint. ``hooks`` switches this on and off, ``quantizer`` is what transformers calls while it
loads and saves, ``modules`` are the layers that end up in the model, ``stored_linears`` finds the quantised
projections outside the experts, ``saving`` writes checkpoints, ``experts_function`` serves models that were made
in another way; after changes of its floats that torch does not count, call :func:`requantize`.
"""

from __future__ import annotations

from .experts_function import requantize
from .hooks import disable, enable, is_enabled
from .versions import TESTED_VERSIONS

__all__ = ["TESTED_VERSIONS", "disable", "enable", "is_enabled", "requantize"]
