"""Text for a language model: its tokenizer, and how much it takes. Imports transformers, and reads no weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..errors import CheckpointError
from ..integrations.transformers.versions import check_version

VOCABULARY_FILES = ("tokenizer.*", "vocab*", "tekken.json", "merges.txt", "*.model", "*.tiktoken")
_WANTED = "put the model's tokenizer.json and tokenizer_config.json there"


class TextInput(NamedTuple):
    """How text goes into a model.

    Attributes:
        tokenizer: of transformers.
        longest: most tokens that the model takes; None where its config does not say.
    """

    tokenizer: Any
    longest: int | None

    def encode(self, text: str) -> torch.Tensor:
        """Token ids of a text, int64 ``[tokens]``."""
        ids: list[int] = self.tokenizer(text)["input_ids"]
        return torch.tensor(ids, dtype=torch.int64)


def load_text_input(folder: Path) -> TextInput:
    """Read a checkpoint's tokenizer and config.

    Raises:
        CheckpointError: there is no tokenizer, or none that can be read.
        ConfigError: transformers is absent or not tested.
    """
    check_version()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers import AutoConfig, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()  # what it warns about are matters of a library's user
    logging.disable_progress_bar()
    if not any(next(folder.glob(pattern), None) for pattern in VOCABULARY_FILES):
        # Without any, transformers makes a tokenizer of nothing.
        raise CheckpointError(
            f"{folder}: its tokenizer cannot be loaded: it holds no tokenizer.json, and no other vocabulary; {_WANTED}"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # it raises nearly anything, from the network's errors to a TypeError
        lines = str(error).strip().splitlines() or [""]
        reason = f"{type(error).__name__}: {lines[0]}"
        absent = [name for name in ("tokenizer.json", "tokenizer_config.json") if not (folder / name).is_file()]
        found = f", and it holds no {' and no '.join(absent)}" if absent else ""
        raise CheckpointError(f"{folder}: its tokenizer cannot be loaded ({reason}){found}; {_WANTED}") from error
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
    except (ValueError, KeyError, OSError, ImportError) as error:
        raise CheckpointError(f"{folder}: transformers cannot read its config.json: {error}") from error
    longest = getattr(config, "max_position_embeddings", None)
    return TextInput(tokenizer, longest if isinstance(longest, int) else None)
