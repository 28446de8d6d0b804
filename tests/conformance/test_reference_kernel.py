"""The suite over the reference kernel. It computes every answer itself, so a reduced grid is enough."""

from int8moe.testing.suite import *  # noqa: F403

kernel = "reference.torch"
grid = "reduced"
