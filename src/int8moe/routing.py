"""From router logits to experts, in fp32."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .errors import ConfigError, UnsupportedInputError

SCORINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: torch.softmax(logits, dim=-1),
    "sigmoid": torch.sigmoid,
}
"""Router logits, fp32 ``[M, num_experts]``, to the scores that become weights."""

_LEAST_SUM = 1e-20  # sigmoid scores may all be 0; below the rounding of any other sum


def select_experts(
    router_logits: Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    renormalize: bool = True,
    e_score_correction_bias: Tensor | None = None,
    num_expert_group: int = 1,
    topk_group: int | None = None,
    routed_scaling_factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Pick ``top_k`` experts a token.

    Args:
        router_logits: ``[M, num_experts]``, any float dtype; taken to fp32 first.
        top_k: experts a token, 1 to num_experts.
        scoring: "softmax" over all experts, or "sigmoid" of each. A model that takes a softmax over the chosen
            logits alone is "softmax" with renormalize.
        renormalize: divide the chosen scores by their sum.
        e_score_correction_bias: ``[num_experts]``, added to the scores while choosing; weights are made from the
            scores without it.
        num_expert_group: groups of equal size that the experts form, in order.
        topk_group: groups a token may choose from; None = all. A group counts as its best score, or with a
            correction bias as the sum of its best two.
        routed_scaling_factor: the weights are multiplied by it, last.

    Returns:
        topk_weights fp32 ``[M, top_k]`` and topk_ids int32 ``[M, top_k]``, best first; of equals the lower id wins.

    Raises:
        ConfigError: unknown scoring, or a count out of range.
        UnsupportedInputError: router_logits is not a 2-D float tensor, or the bias has another shape.
    """
    if not router_logits.is_floating_point() or router_logits.dim() != 2:
        raise UnsupportedInputError(
            f"router_logits is {router_logits.dtype} {list(router_logits.shape)}; give floats [tokens, num_experts]"
        )
    num_experts = router_logits.shape[1]
    bias = e_score_correction_bias
    if scoring not in SCORINGS:
        raise ConfigError(f"scoring={scoring!r} is not supported; give {' or '.join(map(repr, SCORINGS))}")
    if bias is not None and (not bias.is_floating_point() or tuple(bias.shape) != (num_experts,)):
        raise UnsupportedInputError(
            f"e_score_correction_bias is {bias.dtype} {list(bias.shape)}; give floats [{num_experts}], one an expert"
        )
    topk_group = num_expert_group if topk_group is None else topk_group
    _check_counts(num_experts, top_k, num_expert_group, topk_group, best=1 if bias is None else 2)

    logits = router_logits.to(torch.float32)
    scores = SCORINGS[scoring](logits)
    # Softmax and sigmoid keep the order of logits, but round distinct ones to equal scores: logits choose better.
    choice = logits if bias is None else scores + bias.to(torch.float32)
    if topk_group < num_expert_group:
        groups = choice.unflatten(1, (num_expert_group, -1))
        strength = groups.amax(dim=-1) if bias is None else groups.topk(2, dim=-1).values.sum(dim=-1)
        allowed = torch.zeros_like(strength, dtype=torch.bool).scatter_(1, _best(strength, topk_group), True)
        choice = groups.masked_fill(~allowed.unsqueeze(-1), float("-inf")).flatten(1)
    order = _best(choice, top_k)
    weights = scores.gather(1, order)
    if renormalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + _LEAST_SUM)
    if routed_scaling_factor != 1.0:
        weights = weights * routed_scaling_factor
    return weights, order.to(torch.int32)


def _best(values: Tensor, count: int) -> Tensor:
    # A stable sort keeps the lower id first among equals; torch.topk promises no order.
    return torch.sort(values, dim=-1, descending=True, stable=True).indices[:, :count]


def _check_counts(num_experts: int, top_k: int, num_expert_group: int, topk_group: int, *, best: int) -> None:
    if num_expert_group < 1 or num_experts % num_expert_group:
        raise ConfigError(
            f"num_expert_group={num_expert_group}: give a number that divides {num_experts}, the number of experts"
        )
    if not 1 <= topk_group <= num_expert_group:
        raise ConfigError(f"topk_group={topk_group}: give a number from 1 to {num_expert_group}, num_expert_group")
    size = num_experts // num_expert_group
    if topk_group < num_expert_group and size < best:
        raise ConfigError(
            f"num_expert_group={num_expert_group} makes groups of {size} expert; a group's strength with a "
            "correction bias is the sum of its best two, so give fewer groups"
        )
    if not 1 <= top_k <= topk_group * size:
        among = "the number of experts" if topk_group == num_expert_group else f"the experts of {topk_group} groups"
        raise ConfigError(f"top_k={top_k}: give a number from 1 to {topk_group * size}, {among}")
