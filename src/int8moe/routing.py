"""From router logits to experts, in fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import ConfigError, UnsupportedInputError


def select_experts(
    router_logits: Tensor, top_k: int, *, scoring: str = "softmax", renormalize: bool = True
) -> tuple[Tensor, Tensor]:
    """Pick ``top_k`` experts a token.

    Args:
        router_logits: ``[M, num_experts]``, any float dtype; taken to fp32 first.
        top_k: experts a token, 1 to num_experts.
        scoring: "softmax" over all experts.
        renormalize: divide the chosen scores by their sum.

    Returns:
        topk_weights fp32 ``[M, top_k]`` and topk_ids int32 ``[M, top_k]``, highest score first; of equal scores
        the lower id wins.

    Raises:
        ConfigError: unknown scoring, or top_k out of range.
        UnsupportedInputError: router_logits is not a 2-D float tensor.
    """
    if not router_logits.is_floating_point() or router_logits.dim() != 2:
        raise UnsupportedInputError(
            f"router_logits is {router_logits.dtype} {list(router_logits.shape)}; give floats [tokens, num_experts]"
        )
    num_experts = router_logits.shape[1]
    if not 1 <= top_k <= num_experts:
        raise ConfigError(f"top_k={top_k}: give a number from 1 to {num_experts}, the number of experts")
    if scoring != "softmax":
        raise ConfigError(f'scoring={scoring!r} is not supported; give "softmax"')
    scores = torch.softmax(router_logits.to(torch.float32), dim=-1)
    # A stable sort keeps the lower id first among equals; torch.topk promises no order.
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, order)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, order.to(torch.int32)
