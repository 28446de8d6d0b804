"""``experts_implementation="int8moe"`` for a model in memory: its float experts, quantised at the first call.

The float weights stay, so that another implementation can be set again; ``from_pretrained`` with this
implementation quantises while loading instead, and keeps no floats. Which changes of the floats are seen by
themselves is what torch counts: see :func:`requantize`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...contracts import Activation, MoEConfig
from ...errors import ConfigError
from ...layer import FusedMoE
from ...quantize import quantize_weight

ACTIVATION_MODULES: dict[str, Activation] = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "NewGELUActivation": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "GELUTanh": "gelu_tanh",
}
"""Class of a gated experts module's ``act_fn`` -> MoEConfig.activation."""

UNGATED: dict[str, Activation] = {
    "silu": "silu_no_mul",
    "gelu": "gelu_no_mul",
    "gelu_tanh": "gelu_tanh_no_mul",
}

GATES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "GptOssExperts": lambda module: {
        "activation": "swigluoai", "swiglu_alpha": module.alpha, "swiglu_limit": module.limit,
    },
}  # fmt: skip
"""Classes with a gate of their own -> the fields of MoEConfig that compute the same."""

_CACHE = "_int8moe_packed"


def experts_forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What transformers calls in place of an experts module's forward.

    Args:
        self: the experts module, with the weights of the experts that live here.
        hidden_states: ``[M, H]``.
        top_k_index: ``[M, k]``; under expert parallelism ids from num_experts on live elsewhere.
        top_k_weights: ``[M, k]``.

    Raises:
        ConfigError: the module computes something that no MoEConfig describes.
    """
    out: Tensor = packed_experts(self, top_k_index.shape[-1])(hidden_states, top_k_weights, top_k_index)
    return out


@torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
def packed_experts(module: Any, top_k: int) -> FusedMoE:
    """The module's experts, quantised and packed; made anew after a change that torch counts (:func:`requantize`)."""
    parameters = list(module.parameters(recurse=False))
    version = (top_k, *((p.data_ptr(), -1 if p.is_inference() else p._version) for p in parameters))
    found: tuple[Any, FusedMoE] | None = module.__dict__.get(_CACHE)
    if found is None or found[0] != version:
        found = (version, pack_experts(module, top_k))
        object.__setattr__(module, _CACHE, found)  # not through nn.Module, which would make it a submodule
    return found[1]


def requantize(model: nn.Module) -> int:
    """Drop what was quantised in memory for ``experts_implementation="int8moe"``; the next call quantises anew.

    A change is seen without this when torch counts it, or when the weights lie elsewhere after it: operations in place
    on a parameter (``mul_``, ``copy_``, an optimizer's step, ``load_state_dict``), and parameters that are replaced.
    Not seen are writes that go past the count: through ``parameter.data`` or ``parameter.detach().numpy()``, by other
    processes into shared memory, and any into inference tensors (made under ``torch.inference_mode``), which have no
    count; nor a parameter that is put exactly where a freed one lay. Call this after those. It is not to be called
    while another thread runs the model.

    Args:
        model: a model, or a part of one. Experts that ``from_pretrained`` loaded as INT8 have no floats, and stay.

    Returns:
        How many layers will be quantised anew.
    """
    return sum(module.__dict__.pop(_CACHE, None) is not None for module in model.modules())


def pack_experts(module: Any, top_k: int) -> FusedMoE:
    """Quantise the float weights of an experts module, one expert at a time, into a packed layer."""
    config = module_config(module, top_k)
    w13, w13_bias = _weights(module, "gate_up_proj" if module.has_gate else "up_proj")
    w2, w2_bias = _weights(module, "down_proj")
    layer = FusedMoE(config)
    layer.layer_name = type(module).__name__
    for expert in range(config.num_experts):
        first, first_scale = quantize_weight(w13[expert], name="w13", expert=expert)
        second, second_scale = quantize_weight(w2[expert], name="w2", expert=expert)
        layer.load_expert_weights(
            expert,
            w13_weight=first,
            w13_weight_scale=first_scale,
            w2_weight=second,
            w2_weight_scale=second_scale,
            w13_bias=None if w13_bias is None else w13_bias[expert],
            w2_bias=None if w2_bias is None else w2_bias[expert],
            gate_up_layout="stacked" if module.is_concatenated or not module.has_gate else "interleaved",
        )
    layer.process_weights_after_loading()
    return layer


def module_config(module: Any, top_k: int) -> MoEConfig:
    """What an experts module of transformers computes.

    Raises:
        ConfigError: its activation, its gate, or a norm after the experts has no counterpart.
    """
    from transformers.integrations.moe import _default_apply_gate

    name = type(module).__name__
    if getattr(module, "has_post_expert_norm", False):
        raise ConfigError(f"{name} normalises what its experts return, which no kernel does; use its own experts")
    if name in GATES:
        fields = GATES[name](module)
    else:
        if module.has_gate and type(module)._apply_gate is not _default_apply_gate:
            raise ConfigError(f"{name} has a gate of its own; known are those of {', '.join(GATES)}")
        fields = {"activation": activation_of(module.act_fn, gated=module.has_gate, owner=name)}
    down = _weights(module, "down_proj")[0]
    return MoEConfig(
        num_experts=down.shape[0],
        top_k=top_k,
        hidden_size=down.shape[1],
        intermediate_size=down.shape[2],
        has_bias=module.has_bias,
        **fields,
    )


def activation_of(act_fn: object, *, gated: bool, owner: str) -> Activation:
    """MoEConfig.activation of a module that is an activation function."""
    name = type(act_fn).__name__
    if not gated and name == "ReLUSquaredActivation":
        return "relu2_no_mul"
    activation = ACTIVATION_MODULES.get(name)
    if activation is None:
        raise ConfigError(f"{owner} activates by {name}; supported are {', '.join(ACTIVATION_MODULES)}")
    return activation if gated else UNGATED[activation]


def _weights(module: Any, name: str) -> tuple[Tensor, Tensor | None]:
    """A projection of all experts as ``[E, out, in]``, and its bias ``[E, out]``."""
    weight, bias = (_local(getattr(module, part, None)) for part in (name, f"{name}_bias"))
    if weight is None or weight.dim() != 3:
        raise ConfigError(f"{type(module).__name__} has no {name} [experts, out, in]: int8moe does not know its layout")
    return weight.transpose(1, 2) if module.is_transposed else weight, bias if module.has_bias else None


def _local(tensor: Any) -> Any:
    """This rank's part of a tensor that is distributed over several."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
