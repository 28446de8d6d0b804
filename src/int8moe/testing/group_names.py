"""The groups of the conformance suite, in the order in which they run. Imports no torch."""

from __future__ import annotations

GROUP_NAMES = (
    "declaration", "packing", "integers", "bits", "routing", "batch", "strides", "special", "rows", "operator",
    "process", "fork", "refusals",
)  # fmt: skip
"""Each is a module of :mod:`int8moe.testing.groups`."""
