"""What ``int8moe generate`` does with a loaded model. Imports torch and transformers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, TextStreamer

from ..errors import UnsupportedInputError
from .language_model import LanguageModel
from .output import write
from .text_input import TextInput


@dataclass(frozen=True)
class Generation:
    """A continuation.

    Attributes:
        text: without the prompt.
        tokens: its ids; the last one may be the model's end of text.
        prompt_tokens: tokens of the prompt.
        prefill_seconds: until the first token.
        decode_seconds: for all later ones.
    """

    text: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    prefill_seconds: float
    decode_seconds: float

    @property
    def prefill_rate(self) -> float:
        """Tokens of the prompt a second."""
        return self.prompt_tokens / self.prefill_seconds

    @property
    def decode_rate(self) -> float | None:
        """Later tokens a second; None when there is only one."""
        return (len(self.tokens) - 1) / self.decode_seconds if len(self.tokens) > 1 else None


class TimedStreamer(TextStreamer):  # type: ignore[misc]
    """Writes text on stdout as it becomes whole, and notes when each token came."""

    def __init__(self, tokenizer: Any, *, visible: bool) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._visible = visible
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        """Take the prompt, and then each token."""
        self.times.append(time.perf_counter())
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Take text that later tokens do not change."""
        if self._visible and (text or stream_end) and not write(text, end="\n" if stream_end else ""):
            raise BrokenPipeError  # nobody reads on, so that there is nothing to go on for


def _settings(end_of_text: int | list[int] | None, max_new_tokens: int, temperature: float) -> GenerationConfig:
    """All that decides what is generated; of the checkpoint's own settings, the end of text alone."""
    ends = end_of_text if isinstance(end_of_text, list) else [] if end_of_text is None else [end_of_text]
    drawn = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    return GenerationConfig(
        max_new_tokens=max_new_tokens,
        eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else None,
        **(drawn if temperature else {"do_sample": False}),
    )


@contextmanager
def _only(model: Any, settings: GenerationConfig) -> Iterator[None]:
    """Let a model generate by these settings; those passed in a call are filled up with the model's."""
    own = model.generation_config
    model.generation_config = settings
    try:
        yield
    finally:
        model.generation_config = own


def encode_prompt(text_input: TextInput, prompt: str, max_new_tokens: int) -> Tensor:
    """Token ids of a prompt, int64 ``[tokens]``.

    Raises:
        UnsupportedInputError: it has no tokens, or the model takes fewer than are asked for.
    """
    ids = text_input.encode(prompt)
    if not len(ids):
        raise UnsupportedInputError(f"the prompt {prompt!r} has no tokens; give a text to continue")
    longest = text_input.longest
    if longest is not None and len(ids) + max_new_tokens > longest:
        raise UnsupportedInputError(
            f"{len(ids)} tokens of prompt and {max_new_tokens} new ones are more than the {longest} that the model "
            f"takes; give a shorter prompt, or --max-new-tokens {max(longest - len(ids), 0)}"
        )
    return ids


def generate(
    language_model: LanguageModel, ids: Tensor, *, max_new_tokens: int, temperature: float, seed: int, stream: bool
) -> Generation:
    """Continue a prompt; of the checkpoint's generation_config the end of text counts, and nothing else.

    Args:
        language_model: the model.
        ids: of encode_prompt, int64 ``[tokens]``.
        max_new_tokens: at most so many.
        temperature: 0 takes the likeliest token each time.
        seed: of the tokens that are drawn.
        stream: write the text on stdout as it comes.
    """
    torch.manual_seed(seed)
    streamer = TimedStreamer(language_model.text_input.tokenizer, visible=stream)
    settings = _settings(language_model.model.generation_config.eos_token_id, max_new_tokens, temperature)
    with torch.inference_mode(), _only(language_model.model, settings):
        started = time.perf_counter()
        whole = language_model.model.generate(
            input_ids=ids[None],
            attention_mask=torch.ones_like(ids[None]),
            streamer=streamer,
        )
    tokens = tuple(whole[0, len(ids) :].tolist())
    first, last = streamer.times[1], streamer.times[-1]  # the first time is that of the prompt
    text: str = language_model.text_input.tokenizer.decode(tokens, skip_special_tokens=True)
    return Generation(text, tokens, len(ids), first - started, last - first)
