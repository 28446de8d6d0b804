"""The one table of model names: how each model_type spells its config fields and its tensors. No torch.

A new model is a new row of FAMILIES.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..contracts import Activation
from ..errors import CheckpointError
from .names import Naming, Slot, with_and_without_prefix


@dataclass(frozen=True)
class Family:
    """How one model_type is written down.

    Attributes:
        model_type: as config.json has it.
        experts: module name that transformers gives the experts of a layer, with ``{layer}``.
        namings: every spelling of the tensors on disk.
        routers: names of the router's weight, with ``{layer}``; the first one that is stored counts. Its bias and
            its ``e_score_correction_bias`` lie beside it.
        num_experts: config fields, the first one present counts; likewise the next three.
        top_k: slots per token.
        intermediate_size: width of one expert.
        activation: hidden_act.
        fixed_activation: what the experts compute whatever hidden_act says.
        has_bias: every projection has a bias.
        scoring: how router logits become scores.
        renormalize: config field, or the model's fixed habit.
        renormalize_default: where the field is absent.
        grouped: experts are chosen by groups, as n_group and topk_group say, and scaled by routed_scaling_factor.
        sparse_fields: which of the fields that :meth:`moe_layers` reads this model knows.
        first_dense: dense layers at the beginning where first_k_dense_replace is absent.
    """

    model_type: str
    experts: str
    namings: tuple[Naming, ...]
    routers: tuple[str, ...]
    num_experts: tuple[str, ...] = ("num_experts", "num_local_experts")
    top_k: tuple[str, ...] = ("num_experts_per_tok",)
    intermediate_size: tuple[str, ...] = ("moe_intermediate_size",)
    activation: tuple[str, ...] = ("hidden_act",)
    fixed_activation: Activation | None = None
    has_bias: bool = False
    scoring: str = "softmax"
    renormalize: str | bool = True
    renormalize_default: bool = False
    grouped: bool = False
    sparse_fields: tuple[str, ...] = ()
    first_dense: int = 0

    def moe_layers(self, config: Mapping[str, Any], num_layers: int, file: Path) -> tuple[int, ...]:
        """The layers that have routed experts."""
        types = config.get("mlp_layer_types")
        if types is not None:  # newer configs say it layer by layer
            if not isinstance(types, list) or len(types) != num_layers or not set(types) <= {"dense", "sparse"}:
                raise CheckpointError(
                    f"{file}: found mlp_layer_types {types!r}; expected 'dense' or 'sparse' for each of the "
                    f"{num_layers} layers"
                )
            return tuple(layer for layer, kind in enumerate(types) if kind == "sparse")
        known = {name: config[name] for name in self.sparse_fields if config.get(name) is not None}
        dense, step = known.get("mlp_only_layers", []), known.get("decoder_sparse_step", 1)
        numbers = isinstance(dense, list) and all(type(layer) is int and layer >= 0 for layer in dense)
        if not numbers or type(step) is not int or step < 1:
            raise CheckpointError(
                f"{file}: found mlp_only_layers {dense!r}, decoder_sparse_step {step!r}; "
                "expected a list of layer numbers and a number of at least 1"
            )
        first, every = known.get("first_k_dense_replace", self.first_dense), known.get("moe_layer_freq", 1)
        if type(first) is not int or first < 0 or type(every) is not int or every < 1:
            raise CheckpointError(
                f"{file}: found first_k_dense_replace {first!r}, moe_layer_freq {every!r}; "
                "expected numbers of at least 0 and 1"
            )
        return tuple(
            layer
            for layer in range(first, num_layers)
            if layer not in dense and (layer + 1) % step == 0 and layer % every == 0
        )

    def aliases(self, layer: int, expert: int, role: str) -> tuple[str, ...]:
        """Every name by which a quantisation config may mean one projection of one expert."""
        named = [naming.linear(layer, expert, role) for naming in self.namings if not naming.fused]
        named.append(f"{self.experts.format(layer=layer)}.{expert}.{role}_proj")
        return tuple(dict.fromkeys(alias for name in named for alias in with_and_without_prefix(name)))

    def parse(self, name: str) -> tuple[Naming, Slot] | None:
        """Read a tensor's name in any of the spellings."""
        for naming in self.namings:
            if slot := naming.parse(name):
                return naming, slot
        return None


PROJ = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
W123 = {"gate": "w1", "up": "w3", "down": "w2"}
FUSED = {"gate_up": "gate_up_proj", "down": "down_proj"}

_MLP = "model.layers.{layer}.mlp.experts"
_BLOCK_SPARSE = "model.layers.{layer}.block_sparse_moe.experts"
_MLP_NAMINGS = (Naming(_MLP, PROJ), Naming(_MLP, FUSED, fused=True))
_MLP_GATE = "model.layers.{layer}.mlp.gate.weight"
_QWEN_SPARSE = ("mlp_only_layers", "decoder_sparse_step")
_DEEPSEEK_SPARSE = ("first_k_dense_replace", "moe_layer_freq")

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family(
            model_type="qwen3_moe",
            experts=_MLP,
            namings=_MLP_NAMINGS,
            routers=(_MLP_GATE,),
            renormalize="norm_topk_prob",
            sparse_fields=_QWEN_SPARSE,
        ),
        Family(
            model_type="qwen2_moe",
            experts=_MLP,
            namings=_MLP_NAMINGS,
            routers=(_MLP_GATE,),
            renormalize="norm_topk_prob",
            sparse_fields=_QWEN_SPARSE,
        ),
        Family(
            model_type="qwen3_next",
            experts=_MLP,
            namings=_MLP_NAMINGS,
            routers=(_MLP_GATE,),
            renormalize="norm_topk_prob",
            renormalize_default=True,
            sparse_fields=_QWEN_SPARSE,
        ),
        Family(
            model_type="mixtral",
            experts=_MLP,
            namings=(
                Naming(_BLOCK_SPARSE, W123),
                Naming(_BLOCK_SPARSE, PROJ),
                Naming(_BLOCK_SPARSE, FUSED, fused=True),
                *_MLP_NAMINGS,
            ),
            routers=("model.layers.{layer}.block_sparse_moe.gate.weight", _MLP_GATE),
            num_experts=("num_local_experts", "num_experts"),
            intermediate_size=("intermediate_size",),
        ),
        Family(
            model_type="olmoe",
            experts=_MLP,
            namings=_MLP_NAMINGS,
            routers=(_MLP_GATE,),
            intermediate_size=("intermediate_size",),
            renormalize="norm_topk_prob",
        ),
        Family(
            model_type="deepseek_v2",
            experts=_MLP,
            namings=_MLP_NAMINGS,
            routers=(_MLP_GATE,),
            num_experts=("n_routed_experts", "num_experts", "num_local_experts"),
            renormalize="norm_topk_prob",
            grouped=True,
            sparse_fields=_DEEPSEEK_SPARSE,
        ),
        Family(
            model_type="deepseek_v3",
            experts=_MLP,
            namings=_MLP_NAMINGS,
            routers=(_MLP_GATE,),
            num_experts=("n_routed_experts", "num_experts", "num_local_experts"),
            scoring="sigmoid",
            renormalize="norm_topk_prob",
            renormalize_default=True,
            grouped=True,
            sparse_fields=_DEEPSEEK_SPARSE,
            first_dense=3,
        ),
        Family(
            model_type="glm4_moe",
            experts=_MLP,
            namings=_MLP_NAMINGS,
            routers=(_MLP_GATE,),
            num_experts=("n_routed_experts", "num_experts", "num_local_experts"),
            scoring="sigmoid",
            renormalize="norm_topk_prob",
            renormalize_default=True,
            grouped=True,
            sparse_fields=_DEEPSEEK_SPARSE,
            first_dense=1,
        ),
        Family(
            model_type="gpt_oss",
            experts=_MLP,
            namings=(Naming(_MLP, PROJ), Naming(_MLP, FUSED, fused=True, transposed=True, interleaved=True)),
            routers=("model.layers.{layer}.mlp.router.weight",),
            num_experts=("num_local_experts", "num_experts"),
            intermediate_size=("intermediate_size",),
            fixed_activation="swigluoai",
            has_bias=True,
        ),
    )
}
