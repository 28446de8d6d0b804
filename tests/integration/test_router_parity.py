"""``routing.select_experts`` picks what the routers of transformers pick, model by model."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import pytest
import torch

from int8moe.routing import select_experts

pytest.importorskip("transformers")

EXPERTS, TOP_K, HIDDEN, TOKENS = 16, 4, 32, 257


class Router(NamedTuple):
    """A router class of transformers, a config for it, and the arguments that stand for it."""

    model: str
    router: str
    config: str
    fields: dict[str, Any]
    arguments: dict[str, Any]


def softmax(model: str, name: str, count: str, renormalize: bool) -> Router:
    return Router(
        model, f"{name}TopKRouter", f"{name}Config",
        {count: EXPERTS, "norm_topk_prob": renormalize}, {"renormalize": renormalize},
    )  # fmt: skip


def grouped(model: str, name: str, groups: int, chosen: int, renormalize: bool, factor: float) -> Router:
    return Router(
        model, f"{name}TopkRouter", f"{name}Config",
        {"n_routed_experts": EXPERTS, "n_group": groups, "topk_group": chosen, "norm_topk_prob": renormalize,
         "routed_scaling_factor": factor},
        {"scoring": "sigmoid", "num_expert_group": groups, "topk_group": chosen, "renormalize": renormalize,
         "routed_scaling_factor": factor},
    )  # fmt: skip


def limited(method: str, groups: int, chosen: int, factor: float) -> Router:
    return Router(
        "deepseek_v2", "DeepseekV2TopkRouter", "DeepseekV2Config",
        {"n_routed_experts": EXPERTS, "topk_method": method, "n_group": groups, "topk_group": chosen,
         "routed_scaling_factor": factor},
        {"renormalize": False, "routed_scaling_factor": factor}
        | ({} if method == "greedy" else {"num_expert_group": groups, "topk_group": chosen}),
    )  # fmt: skip


ROUTERS = [
    Router("mixtral", "MixtralTopKRouter", "MixtralConfig", {"num_local_experts": EXPERTS}, {}),
    softmax("qwen2_moe", "Qwen2Moe", "num_experts", False),
    softmax("qwen2_moe", "Qwen2Moe", "num_experts", True),
    softmax("qwen3_moe", "Qwen3Moe", "num_experts", False),
    softmax("qwen3_moe", "Qwen3Moe", "num_experts", True),
    softmax("olmoe", "Olmoe", "num_experts", False),
    softmax("olmoe", "Olmoe", "num_experts", True),
    limited("greedy", 4, 2, 1.0),
    limited("group_limited_greedy", 4, 2, 16.0),
    grouped("deepseek_v3", "DeepseekV3", 4, 2, True, 2.5),
    grouped("deepseek_v3", "DeepseekV3", 8, 3, False, 1.0),
    grouped("glm4_moe", "Glm4Moe", 1, 1, True, 1.0),
    grouped("glm4_moe", "Glm4Moe", 4, 3, True, 1.5),
    Router("gpt_oss", "GptOssTopKRouter", "GptOssConfig", {"num_local_experts": EXPERTS}, {}),
]


@pytest.mark.parametrize("case", ROUTERS, ids=lambda case: f"{case.model}-{sorted(case.arguments.items())}")
@pytest.mark.parametrize("scale", [0.3, 2.0])
def test_agrees_with_the_router_of_transformers(case: Router, scale: float) -> None:
    package = importlib.import_module(f"transformers.models.{case.model}.modeling_{case.model}")
    configuration = importlib.import_module(f"transformers.models.{case.model}.configuration_{case.model}")
    config = getattr(configuration, case.config)(hidden_size=HIDDEN, num_experts_per_tok=TOP_K, **case.fields)
    router = getattr(package, case.router)(config)
    generator = torch.Generator().manual_seed(11)
    bias = None
    with torch.no_grad():
        for name, tensor in [*router.named_parameters(), *router.named_buffers()]:
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
            if name == "e_score_correction_bias":
                bias = tensor
        hidden = torch.randn(TOKENS, HIDDEN, generator=generator) * scale
        logits, wanted_weights, wanted_ids = router(hidden)
    weights, ids = select_experts(logits, TOP_K, e_score_correction_bias=bias, **case.arguments)
    assert weights.dtype == torch.float32
    assert ids.dtype == torch.int32
    # The routers of transformers promise no order within a token.
    wanted_ids, order = wanted_ids.sort(dim=-1)
    found_ids, found_order = ids.to(torch.int64).sort(dim=-1)
    assert torch.equal(found_ids, wanted_ids)
    factor = case.arguments.get("routed_scaling_factor", 1.0)
    difference = weights.gather(1, found_order) - wanted_weights.gather(1, order)
    assert float(difference.abs().max()) / factor < 1e-6
    if bias is not None:  # the bias decides: without it other experts are picked
        unbiased = select_experts(logits, TOP_K, **case.arguments)[1]
        assert not torch.equal(unbiased.sort(dim=-1).values, ids.sort(dim=-1).values)
