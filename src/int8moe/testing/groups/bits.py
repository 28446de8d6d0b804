"""Bits against the reference: shapes off every grid x activations x dtypes x biases x threads.

A full cross is out of reach. Every dimension is a deck of values that is dealt out shuffled, again and
again, from a fixed seed: all values come equally often, and in ever new company.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...contracts import ACTIVATIONS, HIDDEN_DTYPES, MoEConfig
from ..case import Case, Grid, skip
from ..makers import Experts, make_experts, make_hidden_states, make_routing
from ..target import Target

T = TypeVar("T")

_SIZES = (1, 2, 3, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 128, 129, 176, 255, 257)
_LARGE_SIZES = (383, 512, 600, 1025)
_TOKENS = (0, 1, 2, 3, 4, 5, 8, 15, 16, 17, 33, 64)
_EXPERTS = ((1, 1), (2, 1), (2, 2), (3, 2), (4, 1), (4, 2), (4, 4), (5, 3), (8, 1), (8, 2), (8, 8), (16, 4))
_SWIGLU = ((1.702, 7.0), (1.0, 2.0), (0.5, 0.25), (2.5, 100.0))
_LAYERS: dict[Grid, int] = {"reduced": 32, "default": 144, "all": 1440}
_CALLS = 4


@dataclass(frozen=True)
class Call:
    """One call of a layer."""

    tokens: int
    dtype: str
    ids_dtype: str
    weights_dtype: str
    distinct: bool
    seed: int

    def inputs(self, config: MoEConfig) -> tuple[Tensor, Tensor, Tensor]:
        """Make hidden_states, topk_weights, topk_ids."""
        x = make_hidden_states(self.tokens, config.hidden_size, dtype=getattr(torch, self.dtype), seed=self.seed)
        return x, *make_routing(
            self.tokens,
            config.num_experts,
            config.top_k,
            seed=self.seed + 1,
            ids_dtype=getattr(torch, self.ids_dtype),
            weights_dtype=getattr(torch, self.weights_dtype),
            distinct=self.distinct,
        )

    def __str__(self) -> str:
        return f"M {self.tokens}, {self.dtype}, ids {self.ids_dtype}, weights {self.weights_dtype}"


@dataclass(frozen=True)
class GridLayer:
    """One layer of a grid and the calls that it gets: data, for whoever checks a library without torch.

    Attributes:
        name: readable, and unique in the grid.
        config: of the layer.
        seed: of ``make_experts``.
        calls: what it is called with.
    """

    name: str
    config: MoEConfig
    seed: int
    calls: tuple[Call, ...]


class Deck(Iterator[T]):
    """Deals ``values`` out in a shuffled order, then shuffles anew."""

    def __init__(self, source: random.Random, values: Sequence[T]) -> None:
        self._source, self._values, self._left = source, list(values), list[T]()

    def __next__(self) -> T:
        if not self._left:
            self._left = self._values.copy()
            self._source.shuffle(self._left)
        return self._left.pop()


def local_map(config: MoEConfig) -> Tensor | None:
    """Make the expert_map of a config that has one: the last experts are here, in reversed order."""
    if not config.has_expert_map:
        return None
    mapping = torch.full((config.num_experts,), -1, dtype=torch.int32)
    first = config.num_experts - config.local_experts
    mapping[first:] = torch.arange(config.local_experts - 1, -1, -1, dtype=torch.int32)
    return mapping


@functools.lru_cache(maxsize=4)
def _experts(config: MoEConfig, seed: int) -> Experts:
    return make_experts(config, seed=seed)


def _declared(target: Target, config: MoEConfig, seed: int) -> MoEConfig:
    """The config without what the kernel does not declare, so that a kernel of few features meets every shape too."""
    features, activations, shapes = target.spec.features, target.activations, target.narrowing.shapes
    changes: dict[str, Any] = {}
    if config.activation not in activations:
        changes["activation"] = activations[seed % len(activations)] if activations else target.spec.activations[0]
    if shapes:
        changes["hidden_size"], changes["intermediate_size"] = shapes[seed % len(shapes)]
    if "bias" not in features:
        changes["has_bias"] = False
    if "expert_map" not in features:
        changes |= {"has_expert_map": False, "num_local_experts": None}
    if "apply_router_weight_on_input" not in features:
        changes["apply_router_weight_on_input"] = False
    return config.model_copy(update=changes)


def _run(target: Target, config: MoEConfig, seed: int, calls: tuple[Call, ...]) -> None:
    config = _declared(target, config, seed)
    experts = _experts(config, seed)
    layer = target.layer(config, experts, expert_map=local_map(config))
    declared = [call for call in calls if getattr(torch, call.dtype) in target.dtypes]
    if not declared:
        skip("no dtype of this case is declared")
    for call in declared:
        target.check(layer, experts, call.inputs(config), expert_map=local_map(config), context=str(call))


def _name(number: int, config: MoEConfig) -> str:
    words = [
        f"{number:03}",
        f"H{config.hidden_size}",
        f"I{config.intermediate_size}",
        f"E{config.num_experts}k{config.top_k}",
        config.activation,
        *(["bias"] if config.has_bias else []),
        *([f"local{config.local_experts}"] if config.has_expert_map else []),
        *(["oninput"] if config.apply_router_weight_on_input else []),
    ]
    return "-".join(words)


def cases(grid: Grid) -> Iterator[Case]:
    """One case for each layer of a grid."""
    for layer in grid_layers(grid):
        run = functools.partial(_run, config=layer.config, seed=layer.seed, calls=layer.calls)
        yield Case("bits", layer.name, run)


def grid_layers(grid: Grid) -> Iterator[GridLayer]:
    """Deal out the layers of a grid, and a few calls for each."""
    source = random.Random(20_240_607)
    sizes = _SIZES if grid != "all" else _SIZES + _LARGE_SIZES
    hidden, inner = Deck(source, sizes), Deck(source, sizes)
    activations, routed = Deck(source, ACTIVATIONS), Deck(source, _EXPERTS)
    biases, mapped = Deck(source, (False, True)), Deck(source, (False, False, False, True))
    swiglu, tokens = Deck(source, _SWIGLU), Deck(source, _TOKENS)
    # Every activation meets every dtype in turn: one deck of dtypes for each activation.
    dtypes = {activation: Deck(source, HIDDEN_DTYPES) for activation in ACTIVATIONS}
    ids = Deck(source, ("int32", "int64"))
    weights = Deck(source, ("float32", "bfloat16", "float16", "float32"))
    distinct = Deck(source, (True, True, False))
    for number in range(_LAYERS[grid]):
        experts, top_k = next(routed)
        activation = next(activations)
        fields: dict[str, Any] = {}
        if activation == "swigluoai":
            fields["swiglu_alpha"], fields["swiglu_limit"] = next(swiglu)
        if next(mapped) and experts > 1:
            fields |= {"has_expert_map": True, "num_local_experts": (experts + 1) // 2}
        config = MoEConfig(
            num_experts=experts,
            top_k=top_k,
            hidden_size=next(hidden),
            intermediate_size=next(inner),
            activation=activation,
            has_bias=next(biases),
            apply_router_weight_on_input=top_k == 1 and number % 2 == 0,
            **fields,
        )
        calls = tuple(
            Call(
                tokens=next(tokens),
                dtype=next(dtypes[activation]),
                ids_dtype=next(ids),
                weights_dtype=next(weights),
                distinct=next(distinct),
                seed=1000 * number + index,
            )
            for index in range(_CALLS)
        )
        yield GridLayer(_name(number, config), config, number, calls)
