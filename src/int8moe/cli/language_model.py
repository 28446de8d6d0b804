"""A whole model for ``generate`` and ``eval``: transformers with INT8 experts, and its tokenizer. Imports torch."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import CheckpointPlan
from ..errors import CheckpointError, ConfigError
from ..integrations.transformers import enable
from ..layer import FusedMoE
from .memory import PeakMemory


@dataclass(frozen=True)
class LanguageModel:
    """A loaded model.

    Attributes:
        model: of transformers, in evaluation mode.
        tokenizer: of transformers.
        kernels: names of the kernels that run its experts.
        dtype: of its hidden states.
        expert_bytes: of the packed weights of its experts.
        load_seconds: reading and packing.
        peak_bytes: growth of the process's memory at its highest while loading.
    """

    model: Any
    tokenizer: Any
    kernels: tuple[str, ...]
    dtype: str
    expert_bytes: int
    load_seconds: float
    peak_bytes: int

    @property
    def longest(self) -> int | None:
        """Most tokens that the model takes; None where its config does not say."""
        longest = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return longest if isinstance(longest, int) else None


def load_language_model(plan: CheckpointPlan, *, dtype: str, quantize: bool) -> LanguageModel:
    """Load a checkpoint with INT8 experts.

    Args:
        plan: the checkpoint.
        dtype: "auto", or the name of a torch dtype.
        quantize: quantise the experts that are stored in floats.

    Raises:
        CheckpointError: the model is not supported, or has no tokenizer.
        ConfigError: transformers is absent or not tested, or a module that it wants is absent.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with enable():
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()  # what it warns about are matters of a library's user
        logging.disable_progress_bar()
        tokenizer = _load_tokenizer(plan.path)
        memory, started = PeakMemory(), time.perf_counter()
        options = {"experts_implementation": "int8moe"} if quantize else {}
        try:
            model = AutoModelForCausalLM.from_pretrained(plan.path, dtype=dtype, local_files_only=True, **options)
        except ModuleNotFoundError as error:
            raise ConfigError(f"loading {plan.path} needs the module {error.name}, which is not installed") from error
        except (ValueError, KeyError, RuntimeError, ImportError) as error:  # what transformers raises for bad files
            raise CheckpointError(f"{plan.path}: transformers cannot load it: {error}") from error
        seconds, peak = time.perf_counter() - started, memory.grown()
    layers = [module for module in model.modules() if isinstance(module, FusedMoE)]
    return LanguageModel(
        model=model,
        tokenizer=tokenizer,
        kernels=tuple(sorted({layer.kernel.name for layer in layers})),
        dtype=str(model.dtype).removeprefix("torch."),
        expert_bytes=sum(_nbytes(layer) for layer in layers),
        load_seconds=seconds,
        peak_bytes=peak,
    )


TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken")


def _load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    if not any(next(folder.glob(pattern), None) for pattern in TOKENIZER_FILES):
        # Without any, transformers makes a tokenizer of nothing for some models.
        raise CheckpointError(
            f"{folder}: its tokenizer cannot be loaded: there is none; put the model's tokenizer.json and "
            "tokenizer_config.json there"
        )
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # it raises nearly anything, from the network's errors to a TypeError
        raise CheckpointError(
            f"{folder}: its tokenizer cannot be loaded ({type(error).__name__}: {error}); "
            "put the model's tokenizer.json and tokenizer_config.json there"
        ) from error


def _nbytes(layer: FusedMoE) -> int:
    tensors = [*layer.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def encode(language_model: LanguageModel, text: str) -> torch.Tensor:
    """Token ids of a text, int64 ``[tokens]``."""
    ids: list[int] = language_model.tokenizer(text)["input_ids"]
    return torch.tensor(ids, dtype=torch.int64)
