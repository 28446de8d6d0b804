"""``experts_implementation="int8moe"`` on experts modules of transformers, by their own rules."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from int8moe.errors import ConfigError

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("enabled")

EXPERTS, TOP_K, HIDDEN, INNER, TOKENS = 6, 2, 32, 48, 9


def make(name: str, **fields: Any) -> Any:
    """An experts module with seeded weights."""
    from transformers import GptOssConfig, MixtralConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    classes = {"mixtral": (MixtralExperts, MixtralConfig), "gpt_oss": (GptOssExperts, GptOssConfig)}
    experts, config = classes[name]
    torch.manual_seed(4)
    module = experts(config(num_local_experts=EXPERTS, hidden_size=HIDDEN, intermediate_size=INNER, **fields))
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return module.requires_grad_(False)


def run(module: Any, implementation: str, ids: torch.Tensor, weights: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    module.config._experts_implementation = implementation
    out: torch.Tensor = module(x, ids, weights)
    return out


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, EXPERTS, (TOKENS, TOP_K), generator=generator)
    weights = torch.rand(TOKENS, TOP_K, generator=generator)
    return ids, weights, torch.randn(TOKENS, HIDDEN, generator=generator)


def relative_l2(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("mixtral", {}),
        ("mixtral", {"hidden_act": "gelu"}),
        ("mixtral", {"hidden_act": "gelu_pytorch_tanh"}),
        ("gpt_oss", {}),
    ],
)
def test_agrees_with_the_eager_experts(name: str, fields: dict[str, Any]) -> None:
    """gpt-oss: transposed, interleaved, with biases and a clamped gate."""
    module = make(name, **fields)
    ids, weights, x = inputs()
    assert relative_l2(run(module, "int8moe", ids, weights, x), run(module, "eager", ids, weights, x)) < 0.02


def test_ids_that_live_elsewhere_contribute_nothing() -> None:
    module = make("mixtral")
    ids, weights, x = inputs()
    elsewhere = ids.clone()
    elsewhere[:, 1] = EXPERTS
    elsewhere[0] = EXPERTS + 3
    muted = weights.clone()
    muted[:, 1] = 0.0
    muted[0] = 0.0
    found = run(module, "int8moe", elsewhere, weights, x)
    assert torch.equal(found, run(module, "int8moe", ids, muted, x))
    assert not found[0].any()


def test_changed_weights_are_quantised_again() -> None:
    module = make("mixtral")
    ids, weights, x = inputs()
    before = run(module, "int8moe", ids, weights, x)
    module.down_proj.mul_(2.0)
    assert torch.equal(run(module, "int8moe", ids, weights, x), 2.0 * before)


def test_a_gate_that_is_not_known_is_refused() -> None:
    module = make("mixtral")

    class OwnGate(type(module)):  # type: ignore[misc]
        def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
            return gate_up

    module.__class__ = OwnGate
    ids, weights, x = inputs()
    with pytest.raises(ConfigError, match="OwnGate has a gate of its own; known are those of GptOssExperts"):
        run(module, "int8moe", ids, weights, x)


def test_an_activation_that_is_not_known_is_refused() -> None:
    ids, weights, x = inputs()
    with pytest.raises(ConfigError, match="MixtralExperts activates by ReLU.*; supported are SiLU"):
        run(make("mixtral", hidden_act="relu"), "int8moe", ids, weights, x)
