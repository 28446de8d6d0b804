"""What ``int8moe eval`` measures with a loaded model. Imports torch."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import UnsupportedInputError
from .language_model import LanguageModel
from .text_input import TextInput

_LOGITS_AT_A_TIME = 1 << 24
"""Windows are taken together until their logits are so many."""


@dataclass(frozen=True)
class TextQuality:
    """How well a model predicts a text.

    Attributes:
        num_bytes: of the text, in UTF-8.
        num_tokens: of the text.
        num_predicted: tokens that are predicted: as many as the windows hold.
        nats: negative log likelihood of these, summed.
        seconds: for all forward passes.
    """

    num_bytes: int
    num_tokens: int
    num_predicted: int
    nats: float
    seconds: float

    @property
    def bits_per_byte(self) -> float:
        """The predicted tokens count for their share of the bytes."""
        return self.nats / math.log(2) / (self.num_bytes * self.num_predicted / self.num_tokens)

    @property
    def perplexity(self) -> float:
        """The exponential of the mean negative log likelihood a token; infinite where that is too large for a float."""
        mean = self.nats / self.num_predicted
        return math.exp(mean) if mean < 700 else math.inf


def encode_text(text_input: TextInput, text: str, window: int) -> Tensor:
    """Token ids of a text, int64 ``[tokens]``.

    Raises:
        UnsupportedInputError: it has fewer than two tokens, or the window is longer than the model takes.
    """
    longest = text_input.longest
    if longest is not None and window > longest:
        raise UnsupportedInputError(f"--window {window} is more than the {longest} tokens that the model takes")
    ids = text_input.encode(text)
    if len(ids) < 2:
        count = f"{len(ids)} token{'' if len(ids) == 1 else 's'}"
        raise UnsupportedInputError(f"the text has {count}; at least 2 are needed to predict one: give a longer text")
    return ids


def measure(language_model: LanguageModel, ids: Tensor, *, num_bytes: int, window: int) -> TextQuality:
    """Predict a text, window by window.

    Args:
        language_model: the model.
        ids: of encode_text, int64 ``[tokens]``.
        num_bytes: of the text, in UTF-8.
        window: tokens that the model sees at a time.
    """
    vocabulary = language_model.model.config.get_text_config().vocab_size
    together = max(1, _LOGITS_AT_A_TIME // (window * vocabulary))
    nats, predicted, started = 0.0, 0, time.perf_counter()
    with torch.inference_mode():
        for seen, next_ids in _with_progress(list(_batches(ids, window, together))):
            logits = language_model.model(input_ids=seen, use_cache=False).logits.to(torch.float32)
            losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), next_ids.flatten(), reduction="none")
            nats += float(losses.to(torch.float64).sum())
            predicted += losses.numel()
    seconds = time.perf_counter() - started
    return TextQuality(num_bytes, len(ids), predicted, nats, seconds)


def _batches(ids: Tensor, window: int, together: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Windows ``[windows, window]`` and the token after each of theirs; a text shorter than one is one.

    A rest is left out: its tokens would be predicted from less than those of a window.
    """
    seen, next_ids = ids[:-1], ids[1:]
    whole = len(seen) // window * window
    if whole:
        pieces = (part[:whole].reshape(-1, window).split(together) for part in (seen, next_ids))
        yield from zip(*pieces, strict=True)
    else:
        yield seen[None], next_ids[None]


def _with_progress(batches: list[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """A bar on a terminal's stderr."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield from batches
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(batches, description="predicting", console=Console(stderr=True), transient=True)
