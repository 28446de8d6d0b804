"""Numbers on the command line. Imports no torch."""

from __future__ import annotations

import math
from typing import Any

import click


class Number(click.FloatRange):
    """A finite number in a range. click alone takes nan for one, as nan lies neither below nor above anything."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Text -> number; what is no number of the range is a usage error."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class Temperature(Number):
    """0, or a number from 0.01 to 100: logits divided by less leave the range of fp32."""

    LEAST = 0.01

    def __init__(self) -> None:
        super().__init__(0.0, 100.0)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Text -> number; what is no temperature is a usage error."""
        number = super().convert(value, param, ctx)
        if 0 < number < self.LEAST:
            self.fail(f"{value} is below {self.LEAST}; give 0, which takes the likeliest token, or more.", param, ctx)
        return number
