"""``experts_implementation="int8moe"`` on experts modules of transformers, by their own rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from int8moe.errors import ConfigError
from int8moe.integrations.transformers import requantize

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


COUNTED: dict[str, Callable[[Any], object]] = {
    "in place": lambda module: module.down_proj.mul_(0.5),
    "under inference mode": torch.inference_mode()(lambda module: module.down_proj.mul_(0.5)),
    "through a view": lambda module: module.down_proj[0].mul_(0.5),
    "load_state_dict": lambda module: module.load_state_dict(
        {name: tensor * 0.5 for name, tensor in module.state_dict().items()}
    ),
    "replaced": lambda module: setattr(module, "down_proj", torch.nn.Parameter(module.down_proj * 0.5, False)),
    "data replaced": lambda module: setattr(module.down_proj, "data", module.down_proj * 0.5),
}
NOT_COUNTED: dict[str, Callable[[Any], object]] = {
    "through data": lambda module: module.down_proj.data.mul_(0.5),
    "through numpy": lambda module: np.multiply(view := module.down_proj.numpy(), 0.5, out=view),
}


def fresh(module: Any) -> Any:
    """The same weights in a module that nothing was quantised for."""
    made = make("mixtral")
    made.load_state_dict(module.state_dict())
    return made


@pytest.mark.parametrize("kind", COUNTED)
def test_changes_that_are_counted_are_seen(kind: str) -> None:
    module = make("mixtral")
    ids, weights, x = inputs()
    before = run(module, "int8moe", ids, weights, x)
    COUNTED[kind](module)
    found = run(module, "int8moe", ids, weights, x)
    assert not torch.equal(found, before)
    assert torch.equal(found, run(fresh(module), "int8moe", ids, weights, x))


@pytest.mark.parametrize("kind", [*NOT_COUNTED, "inference tensors"])
def test_requantize_makes_all_others_seen(kind: str) -> None:
    with torch.inference_mode(kind == "inference tensors"):
        module = torch.nn.ModuleList([make("mixtral"), make("mixtral"), torch.nn.Linear(2, 2)])
    ids, weights, x = inputs()
    before = run(module[0], "int8moe", ids, weights, x)
    with torch.inference_mode(kind == "inference tensors"):
        NOT_COUNTED.get(kind, COUNTED["in place"])(module[0])
    assert torch.equal(run(module[0], "int8moe", ids, weights, x), before)  # as the documentation says
    assert requantize(module) == 1  # nothing was quantised for the other one
    assert requantize(module) == 0
    found = run(module[0], "int8moe", ids, weights, x)
    assert not torch.equal(found, before)
    assert torch.equal(found, run(fresh(module[0]), "int8moe", ids, weights, x))


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
