"""Which part of the suite to run, as data. Imports no torch and no pytest."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..contracts import ACTIVATIONS, HIDDEN_DTYPES, MAX_REDUCTION
from ..errors import ConfigError
from ..near_names import near_names


class Narrowing(NamedTuple):
    """What is left of the suite; an empty field leaves all.

    Attributes:
        activations: names of ACTIVATIONS.
        dtypes: names of HIDDEN_DTYPES.
        shapes: (hidden_size, intermediate_size). The group bits runs all of its layers at these; of other groups,
            cases about another size are left out.
    """

    activations: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        words = {
            "activation": self.activations,
            "dtype": self.dtypes,
            "shape": tuple(f"{hidden}x{inner}" for hidden, inner in self.shapes),
        }
        return "; ".join(f"{name} {', '.join(values)}" for name, values in words.items() if values)


WHOLE = Narrowing()
"""Leaves out nothing."""


def parse_narrowing(activations: Sequence[str], dtypes: Sequence[str], shapes: Sequence[str]) -> Narrowing:
    """Make a Narrowing of what somebody wrote.

    Args:
        activations: names.
        dtypes: names.
        shapes: ``HxI``, such as "2048x768".

    Raises:
        ConfigError: a word that is not known.
    """
    for word in activations:
        check_known("activation", word, ACTIVATIONS)
    for word in dtypes:
        check_known("dtype", word, HIDDEN_DTYPES)
    return Narrowing(tuple(activations), tuple(dtypes), tuple(map(_shape, shapes)))


def check_known(what: str, word: str, known: Iterable[str]) -> None:
    """Refuse a word that is not among those known, with near names and the list; ConfigError."""
    known = list(known)
    if word not in known:
        near = near_names(word, known, count=2)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ConfigError(f"no {what} is called {word!r}: {hint}choose from {', '.join(known)}")


def _shape(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([0-9]{1,6})x([0-9]{1,6})", text)
    hidden, inner = (int(found[1]), int(found[2])) if found else (0, 0)
    if not (1 <= hidden <= MAX_REDUCTION and 1 <= inner <= MAX_REDUCTION):
        raise ConfigError(
            f"{text!r} is no shape: write hidden_size x intermediate_size, each from 1 to {MAX_REDUCTION}, "
            "such as 2048x768"
        )
    return hidden, inner
