"""Packs one layer, times it, and compares a sample of its tokens with the reference. Imports torch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import reference
from ..layer import FusedMoE
from ..testing.bits import assert_matches, same_bits
from .memory import PeakMemory
from .progress import WeightProgress
from .source_layers import SourceLayer

SAMPLE_TOKENS = 8
_SECONDS_PER_TIMING = 0.3
_MOST_REPEATS = 50
_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class LayerRun:
    """What one layer did.

    Attributes:
        layer: its name.
        kernel: that packed and ran it.
        layout: of the packed weights.
        source_bytes: of its expert weights at the source.
        load_seconds: reading, copying and packing.
        pack_seconds: packing alone; 0 where the packed cache had the layer.
        cache: what the packed cache did: "read", "written", "absent", "failed", or "" without one.
        peak_bytes: growth of the process's memory at its highest, from before the layer existed.
        dtype: of the hidden states.
        decode_seconds: one token, median.
        prefill_seconds: all tokens, median.
        compared_tokens: how many outputs were compared with the reference.
        bits_equal: whether all of their bits are the reference's.
        as_declared: bits equal, or within the tolerance that the kernel declares.
        difference: the first difference, "" where there is none.
    """

    layer: str
    kernel: str
    layout: str
    source_bytes: int
    load_seconds: float
    pack_seconds: float
    cache: str
    peak_bytes: int
    dtype: str
    decode_seconds: float
    prefill_seconds: float
    compared_tokens: int
    bits_equal: bool
    as_declared: bool
    difference: str


def run_layer(source: SourceLayer, *, kernel: str | None, tokens: int, seed: int, progress: WeightProgress) -> LayerRun:
    """Load, pack, run, time and compare one layer; nothing of it is kept."""
    memory = PeakMemory()
    started = time.perf_counter()
    progress.begin(source.name)
    layer, pack_seconds, cache = source.load(kernel, progress.advance)
    progress.end(cached=cache == "read")
    load_seconds = time.perf_counter() - started
    peak_bytes = memory.grown()

    dtype = next(name for name in _DTYPES if name in layer.kernel.spec.dtypes)
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, source.config.hidden_size, generator=generator).to(getattr(torch, dtype))
    with torch.inference_mode():
        weights, ids = source.route(hidden)
        one = hidden[:1], weights[:1], ids[:1]
        decoded, decode_seconds = _timed(lambda: layer(*one))
        prefilled, prefill_seconds = _timed(lambda: layer(hidden, weights, ids))
        sample = _sample(tokens)
        expected = _reference(source, hidden[sample], weights[sample], ids[sample])
    pairs = (("decode", decoded, expected[:1]), ("prefill", prefilled[sample], expected))
    return LayerRun(
        layer=source.name,
        kernel=layer.kernel.name,
        layout=layer.weight_layout.tag if layer.weight_layout is not None else "",
        source_bytes=source.nbytes,
        load_seconds=load_seconds,
        pack_seconds=pack_seconds,
        cache=cache,
        peak_bytes=peak_bytes,
        dtype=dtype,
        decode_seconds=decode_seconds,
        prefill_seconds=prefill_seconds,
        compared_tokens=1 + len(sample),
        bits_equal=all(same_bits(actual, wanted) for _, actual, wanted in pairs),
        as_declared=not (difference := _difference(layer, pairs)),
        difference=difference,
    )


def _timed(call: Callable[[], Tensor]) -> tuple[Tensor, float]:
    """The result, and the median time of calls after the first."""
    result = call()
    seconds: list[float] = []
    while not seconds or (sum(seconds) < _SECONDS_PER_TIMING and len(seconds) < _MOST_REPEATS):
        started = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - started)
    return result, statistics.median(seconds)


def _sample(tokens: int) -> list[int]:
    """The first token, the last, and some between them."""
    count = min(tokens, SAMPLE_TOKENS)
    return sorted({round(i * (tokens - 1) / max(count - 1, 1)) for i in range(count)})


def _reference(source: SourceLayer, hidden: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """The reference's answer, from the canonical tensors of only those experts that the sample goes to."""
    experts = sorted(set(ids.flatten().tolist()))
    expert_map = torch.full((source.config.num_experts,), -1, dtype=torch.int32)
    expert_map[experts] = torch.arange(len(experts), dtype=torch.int32)
    config = source.config
    return reference.fused_experts(
        hidden,
        topk_weights=weights,
        topk_ids=ids,
        expert_map=expert_map,
        activation=config.activation,
        swiglu_alpha=config.swiglu_alpha,
        swiglu_limit=config.swiglu_limit,
        **source.canonical(experts)._asdict(),
    )


def _difference(layer: FusedMoE, pairs: tuple[tuple[str, Tensor, Tensor], ...]) -> str:
    for context, actual, wanted in pairs:
        try:
            assert_matches(layer.kernel.spec.numerics, actual, wanted, context)
        except AssertionError as error:
            return str(error)
    return ""
