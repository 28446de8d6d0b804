"""A whole model for ``generate`` and ``eval``: transformers with INT8 experts. Imports torch."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from ..checkpoint import CheckpointPlan
from ..errors import CheckpointError, ConfigError
from ..integrations.transformers import enable
from ..layer import FusedMoE
from .memory import PeakMemory
from .text_input import TextInput, load_text_input


@dataclass(frozen=True)
class LanguageModel:
    """A loaded model.

    Attributes:
        model: of transformers, in evaluation mode.
        text_input: its tokenizer, and the most tokens that it takes.
        kernels: names of the kernels that run its experts.
        dtype: of its hidden states.
        expert_bytes: of the packed weights of its experts.
        load_seconds: reading and packing.
        peak_bytes: growth of the process's memory at its highest while loading.
    """

    model: Any
    text_input: TextInput
    kernels: tuple[str, ...]
    dtype: str
    expert_bytes: int
    load_seconds: float
    peak_bytes: int


def load_language_model(
    plan: CheckpointPlan, *, dtype: str, quantize: bool, text_input: TextInput | None = None
) -> LanguageModel:
    """Load a checkpoint with INT8 experts.

    Args:
        plan: the checkpoint.
        dtype: "auto", or the name of a torch dtype.
        quantize: quantise the experts that are stored in floats.
        text_input: the checkpoint's, where it has been loaded already.

    Raises:
        CheckpointError: the model is not supported or not whole, or has no tokenizer.
        ConfigError: transformers is absent or not tested, or a module that it wants is absent.
    """
    if text_input is None:
        text_input = load_text_input(plan.path)
    with enable():
        from transformers import AutoModelForCausalLM

        memory, started = PeakMemory(), time.perf_counter()
        options = {"experts_implementation": "int8moe"} if quantize else {}
        try:
            model, found = AutoModelForCausalLM.from_pretrained(
                plan.path, dtype=dtype, local_files_only=True, output_loading_info=True, **options
            )
        except ModuleNotFoundError as error:
            raise ConfigError(f"loading {plan.path} needs the module {error.name}, which is not installed") from error
        except (ValueError, KeyError, RuntimeError, ImportError) as error:  # what transformers raises for bad files
            raise CheckpointError(f"{plan.path}: transformers cannot load it: {error}") from error
        if missing := sorted(found["missing_keys"]):  # transformers makes them up at random
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise CheckpointError(
                f"{plan.path}: lacks {', '.join(missing[:3])}{more}; a whole language model is wanted, not its base "
                "model alone: save the whole, or fetch the checkpoint again"
            )
        seconds, peak = time.perf_counter() - started, memory.grown()
    layers = [module for module in model.modules() if isinstance(module, FusedMoE)]
    return LanguageModel(
        model=model,
        text_input=text_input,
        kernels=tuple(sorted({layer.kernel.name for layer in layers})),
        dtype=str(model.dtype).removeprefix("torch."),
        expert_bytes=sum(_nbytes(layer) for layer in layers),
        load_seconds=seconds,
        peak_bytes=peak,
    )


def _nbytes(layer: FusedMoE) -> int:
    tensors = [*layer.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
