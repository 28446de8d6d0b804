"""A model_type that is not in the table, whose tensors follow a known pattern all the same. Imports no torch.

Names and sizes are read from the tensors where config.json does not say them under a usual name. Nothing is
guessed that names do not show: transposed or biased experts and clamped activations need a row of the table.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .families import FAMILIES, FUSED, PROJ, W123, Family
from .files import TensorEntry
from .models import Model, moe_config, positive, present, read_routing, refuse_absurd
from .names import NUMBER, Naming, experts_place

_PROJECTIONS = "|".join(dict.fromkeys((*PROJ.values(), *W123.values(), *FUSED.values())))
_MODULE = re.compile(rf"((?:[\w-]+\.)*layers)\.{NUMBER}(\.(?:[\w-]+\.)*experts)\.(?:[0-9]+\.)?(?:{_PROJECTIONS})\b.*")
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "num_routed_experts", "moe_num_experts")
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_top_k", "moe_topk", "moe_k")
_INTERMEDIATE = ("moe_intermediate_size", "expert_intermediate_size", "moe_ffn_hidden_size")
_ACTIVATION = ("hidden_act", "hidden_activation", "activation_function")
_NUM_LAYERS = ("num_hidden_layers", "num_layers", "n_layer")
_ROUTERS = ("gate", "router")
_CLAMPS = ("swiglu_limit", "swiglu_limits", "swiglu_alpha")


def recognise_model(config: Mapping[str, Any], tensors: Mapping[str, TensorEntry], file: Path) -> Model:
    """Read a model from the names and shapes of its tensors; CheckpointError says what cannot be known."""
    model_type = config["model_type"]
    nested = config.get("text_config")
    config = {**config, **(nested if isinstance(nested, dict) else {})}
    modules = Counter(
        f"{match[1]}.{{layer}}{match[3]}"
        for name in tensors
        if (place := experts_place(name)) and not place.draft and (match := _MODULE.fullmatch(name))
    )
    known = f"supported: {', '.join(sorted(FAMILIES))}"
    if not modules:
        raise CheckpointError(
            f"{file}: model_type {model_type!r} is not in the table of names, and no tensor is named like "
            f"...layers.0...experts.0.gate_proj.weight; {known}"
        )
    for name in _CLAMPS:
        if config.get(name) is not None:
            raise CheckpointError(
                f"{file}: model_type {model_type!r} is not in the table of names, and {name} {config[name]!r} changes "
                f"the activation in a way that only the table can tell; {known}"
            )
    family = _family(model_type, modules.most_common(1)[0][0], config)
    num_layers, layers, sizes, fields = _sizes(config, family, tensors, file)
    refuse_absurd(sizes, num_layers, fields, file)
    moe = moe_config(config, family, sizes, file)
    return Model(family, moe, num_layers, layers, read_routing(config, family, file), fields)


def _family(model_type: str, module: str, config: Mapping[str, Any]) -> Family:
    scoring = config.get("scoring_func")
    parent = module.rpartition(".")[0]
    return Family(
        model_type=model_type,
        experts=module,
        namings=(Naming(module, PROJ), Naming(module, W123), Naming(module, FUSED, fused=True)),
        routers=tuple(f"{parent}.{router}.weight" for router in _ROUTERS),
        num_experts=_NUM_EXPERTS,
        top_k=TOP_K,
        intermediate_size=_INTERMEDIATE,
        activation=_ACTIVATION,
        scoring=scoring if isinstance(scoring, str) else "softmax",
        renormalize="norm_topk_prob",
        grouped=True,
    )


def _sizes(
    config: Mapping[str, Any], family: Family, tensors: Mapping[str, TensorEntry], file: Path
) -> tuple[int, tuple[int, ...], dict[str, int], dict[str, str]]:
    """Layers of the model, its MoE layers, the sizes of its experts, and where each size is from."""
    layers, experts = set(), {0}
    shapes: Counter[tuple[int, int, int]] = Counter()  # experts in the tensor, rows of one projection, columns
    for name, entry in tensors.items():
        if (parsed := family.parse(name)) is None:
            continue
        naming, slot = parsed
        layers.add(slot.layer)
        experts.add(slot.expert or 0)
        if slot.suffix == "weight" and slot.role in ("gate", "gate_up") and len(entry.shape) == 2 + naming.fused:
            count, rows, columns = entry.shape if naming.fused else (0, *entry.shape)
            shapes[count, rows // 2 if naming.fused else rows, columns] += 1
    if not shapes:
        raise CheckpointError(
            f"{file.parent}: {family.experts} holds no gate projection with a weight of a known shape"
        )
    count, rows, columns = shapes.most_common(1)[0][0]
    fields = {"top_k": present(config, family.top_k)}
    sizes = {"top_k": positive(config, fields["top_k"], file)}
    seen = {"num_experts": count or max(experts) + 1, "hidden_size": columns, "intermediate_size": rows}
    named = {
        "num_experts": family.num_experts,
        "hidden_size": ("hidden_size",),
        "intermediate_size": family.intermediate_size,
    }
    for size, names in named.items():
        field = present(config, names)
        stated = config.get(field) is not None
        sizes[size] = positive(config, field, file) if stated else seen[size]
        fields[size] = field if stated else f"{size} of the tensors"
    field = present(config, _NUM_LAYERS)
    num_layers = positive(config, field, file) if config.get(field) is not None else max(layers) + 1
    inside = tuple(sorted(layer for layer in layers if layer < num_layers))
    if not inside:
        raise CheckpointError(f"{file}: none of the {num_layers} layers stores experts")
    return num_layers, inside, sizes, fields
