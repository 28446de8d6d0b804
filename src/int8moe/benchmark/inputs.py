"""Inputs of the calls of one point: every call does the same work, on other experts."""

from __future__ import annotations

import torch
from torch import Tensor

from ..contracts import MoEConfig
from .request import ROUTINGS
from .roofline import Work, work_of


class PointInputs:
    """Hidden states, router weights, and expert ids that differ from call to call.

    The routing is drawn once; each call gets it with the experts renamed at random. So the number of touched experts
    and of rows an expert is the same in every call, while the weights that are read are not.

    Args:
        config: the layer; its hidden_dtype is that of the hidden states.
        tokens: M.
        routing: one of :data:`ROUTINGS`.
        seed: of everything random.

    Attributes:
        work: what each call does.
        hidden_states: ``[M, H]``.
        topk_weights: fp32 ``[M, top_k]``.
    """

    def __init__(self, config: MoEConfig, tokens: int, *, routing: str = "uniform", seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed * 1_000_003 + tokens)
        self._num_experts = config.num_experts
        self._pattern = _pattern(routing, tokens, config.num_experts, config.top_k, self._generator)
        self.work: Work = work_of(config, tokens, int(self._pattern.unique().numel()))
        dtype: torch.dtype = getattr(torch, config.hidden_dtype or "bfloat16")
        self.hidden_states = torch.randn(tokens, config.hidden_size, generator=self._generator).to(dtype)
        self.topk_weights = torch.full((tokens, config.top_k), 1 / config.top_k)

    def next_ids(self) -> Tensor:
        """int32 ``[M, top_k]``: ids of the next call."""
        names = torch.randperm(self._num_experts, generator=self._generator)
        return names[self._pattern].to(torch.int32)


def _pattern(routing: str, tokens: int, num_experts: int, top_k: int, generator: torch.Generator) -> Tensor:
    """int64 ``[M, top_k]``, different ids within a row."""
    if routing == "uniform":
        return torch.rand(tokens, num_experts, generator=generator).argsort(dim=1)[:, :top_k].contiguous()
    if routing == "zipf":
        popularity = 1 / torch.arange(1, num_experts + 1, dtype=torch.float32)
        return torch.multinomial(popularity.expand(tokens, -1), top_k, generator=generator)
    if routing == "one":
        return torch.arange(top_k).expand(tokens, -1).contiguous()
    raise ValueError(f"routing {routing!r}: give {', '.join(ROUTINGS)}")
