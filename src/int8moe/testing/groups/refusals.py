"""Refusals: what a layer does not take is refused by name, before any kernel runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...binding import select_kernel
from ...contracts import ACTIVATIONS, HIDDEN_DTYPES, MAX_REDUCTION, MoEConfig
from ...errors import ConfigError, Int8MoEError, NoKernelError, UnsupportedInputError, WeightLayoutError
from ...layer import FusedMoE
from ..case import Case, Grid, skip
from ..makers import make_experts
from ..target import Target


def refuses(kind: type[Exception], call: Callable[[], object], *words: str) -> None:
    """Raise AssertionError unless ``call`` raises ``kind`` with a text that has every word."""
    text: str | None = None
    try:
        call()
    except kind as error:
        text = str(error)
    if text is not None:
        missing = [word for word in words if word not in text]
        assert not missing, f"the error does not name {missing}: {text}"
        return
    raise AssertionError(f"was accepted; {kind.__name__} naming {', '.join(words)} was expected")


def _inputs(target: Target, change: str) -> None:
    config = target.config()
    layer = target.layer(config)
    x, weights, ids = target.inputs(config, 4)
    changed: dict[str, tuple[Any, ...]] = {
        "hidden-float64": (x.double(), weights, ids, "hidden_states"),
        "hidden-int8": (x.to(torch.int8), weights, ids, "hidden_states"),
        "hidden-width": (x[:, :-1], weights, ids, "hidden_states"),
        "hidden-scalar": (x[0, 0], weights, ids, "hidden_states"),
        "hidden-meta": (x.to("meta"), weights, ids, ""),
        "ids-float": (x, weights, ids.float(), "topk_ids"),
        "ids-int16": (x, weights, ids.to(torch.int16), "topk_ids"),
        "ids-uint8": (x, weights, ids.to(torch.uint8), "topk_ids"),
        "ids-bool": (x, weights, ids.bool(), "topk_ids"),
        "ids-columns": (x, weights, ids[:, :1], "topk_ids"),
        "ids-rows": (x, weights, ids[:3], "topk_ids"),
        "ids-flat": (x, weights, ids.flatten(), "topk_ids"),
        "ids-meta": (x, weights, ids.to("meta"), "topk_ids"),
        "weights-int": (x, weights.to(torch.int32), ids, "topk_weights"),
        "weights-rows": (x, weights[:3], ids, "topk_weights"),
        "weights-columns": (x, torch.cat([weights, weights], dim=1), ids, "topk_weights"),
    }
    *given, word = changed[change]
    there = [tensor if tensor.is_meta else target.to_device(tensor) for tensor in given]
    refuses(UnsupportedInputError, lambda: layer(*there), word)


_CHANGES = (
    "hidden-float64", "hidden-int8", "hidden-width", "hidden-scalar", "hidden-meta",
    "ids-float", "ids-int16", "ids-uint8", "ids-bool", "ids-columns", "ids-rows", "ids-flat", "ids-meta",
    "weights-int", "weights-rows", "weights-columns",
)  # fmt: skip


def _out(target: Target) -> None:
    config = target.config()
    layer = target.layer(config)
    inputs = [target.to_device(tensor) for tensor in target.inputs(config, 4)]
    other = torch.float16 if inputs[0].dtype == torch.float32 else torch.float32
    for wrong in (torch.empty_like(inputs[0][:3]), inputs[0].to(other), inputs[0].to("meta")):
        refuses(UnsupportedInputError, functools.partial(layer, *inputs, out=wrong), "out")


def _select(target: Target, config: MoEConfig) -> str:
    return select_kernel(config, kernel=target.name, device=target.spec.device).chosen


def _undeclared_dtype(target: Target) -> None:
    config = target.config()
    layer = target.layer(config)
    missing = [name for name in HIDDEN_DTYPES if name not in target.spec.dtypes]
    if not missing:
        skip("every dtype is declared")
    for name in missing:
        x, weights, ids = map(target.to_device, target.inputs(config, 2))
        call = functools.partial(layer, x.to(getattr(torch, name)), weights, ids)
        refuses(UnsupportedInputError, call, "hidden_states", name)
        refuses(NoKernelError, functools.partial(_select, target, target.config(hidden_dtype=name)), name)


def _undeclared(target: Target) -> None:
    """What the spec does not list is refused at selection, naming it."""
    questions: dict[str, dict[str, Any]] = {
        a: {"activation": a} for a in ACTIVATIONS if a not in target.spec.activations
    }
    extras: dict[str, dict[str, Any]] = {
        "bias": {"has_bias": True},
        "expert_map": {"has_expert_map": True, "num_local_experts": 2},
        "apply_router_weight_on_input": {"apply_router_weight_on_input": True, "top_k": 1},
    }
    questions |= {name: fields for name, fields in extras.items() if name not in target.spec.features}
    if not questions:
        skip("everything is declared")
    for word, fields in questions.items():
        refuses(NoKernelError, functools.partial(_select, target, target.config(**fields)), word)


def _too_long(target: Target, field: str) -> None:
    """H or I above 65,793 is refused at selection, naming the bound, before any memory is taken."""
    for size in (MAX_REDUCTION + 1, 10**6, 2**31):
        asked = target.config(num_experts=1, top_k=1, **{field: size})
        refuses(NoKernelError, functools.partial(target.empty_layer, asked), "65,793", field)
        refuses(NoKernelError, functools.partial(select_kernel, asked, device=target.spec.device), "65,793", field)
    edge = target.config(num_experts=1, top_k=1, **{field: MAX_REDUCTION})
    target.need_config(edge)
    assert _select(target, edge) == target.name


def _never_packed(target: Target) -> None:
    """A layer that is empty, loaded or reset refuses to run, naming kernel and layer."""
    config = target.config()
    inputs = [target.to_device(tensor) for tensor in target.inputs(config, 3)]
    empty = target.empty_layer(config)
    loaded = target.layer(config, packed=False)
    reset = target.layer(config)
    reset.reset()
    for layer in (empty, loaded, reset):
        words = target.name, layer.layer_name, "process_weights_after_loading"
        refuses(WeightLayoutError, functools.partial(layer, *inputs), *words)
        rows = inputs[0], torch.tensor([3, 0, 0, 0])
        refuses(WeightLayoutError, functools.partial(layer.forward_sorted, *rows), *words)
    refuses(WeightLayoutError, empty.process_weights_after_loading, "load_weights")
    renamed = target.empty_layer(config)
    renamed.layer_name = "model.layers.7.mlp.experts"
    refuses(WeightLayoutError, functools.partial(renamed, *inputs), target.name, renamed.layer_name)


def _load_when_packed(target: Target) -> None:
    config = target.config()
    experts = make_experts(config)
    layer = target.layer(config, experts)
    refuses(WeightLayoutError, lambda: layer.load_weights(**experts.tensors()), "reload_weights", "reset")
    one = {name: tensor[0] for name, tensor in experts.tensors().items()}
    refuses(WeightLayoutError, lambda: layer.load_expert_weights(0, **one), "reset")
    target.check(layer, experts, target.inputs(config, 4), context="after refused loads")


def _bad_weights(target: Target) -> None:
    """Missing, NaN, negative, infinite scales; wrong shapes and dtypes: by parameter and expert."""
    config = target.config(num_experts=8)
    experts = make_experts(config)
    layer = target.empty_layer(config)
    for name in ("w13_weight_scale", "w2_weight_scale"):
        for value in (float("nan"), -1.0, float("inf")):
            bad = experts.clone().tensors()
            bad[name][5, 3] = value
            refuses(WeightLayoutError, functools.partial(layer.load_weights, **bad), name, "5")
    changes: dict[str, tuple[str, Any]] = {
        "float weights": ("w13_weight", experts.w13_weight.float()),
        "wrong columns": ("w2_weight", experts.w2_weight[:, :, :-1]),
        "wrong experts": ("w13_weight", experts.w13_weight[:7]),
        "block scales": ("w13_weight_scale", experts.w13_weight_scale[:, :3]),
        "no scale": ("w2_weight_scale", None),
        "bias without has_bias": ("w2_bias", torch.zeros(8, config.hidden_size)),
    }
    for name, value in changes.values():
        wrong = experts.tensors() | {name: value}
        refuses(WeightLayoutError, functools.partial(layer.load_weights, **wrong), name)
    one = {name: tensor[0] for name, tensor in experts.tensors().items()}
    layer.load_expert_weights(0, **one)
    refuses(WeightLayoutError, layer.process_weights_after_loading, "1, 2, 3, 4, 5, 6, 7")


def _configs(target: Target) -> None:
    refuses(ConfigError, lambda: target.config(top_k=2, apply_router_weight_on_input=True), "top_k")
    refuses(ConfigError, lambda: target.config(hidden_size=0), "hidden_size")
    refuses(ConfigError, lambda: target.config(num_experts=-1), "num_experts")
    refuses(ConfigError, lambda: target.config(activation="sliu"), "activation")
    unknown = functools.partial(FusedMoE, target.config(), kernel=target.name + "x", device=target.spec.device)
    refuses(NoKernelError, unknown, target.name)


def _sorted_rows(target: Target) -> None:
    config = target.config()
    layer = target.layer(config)
    x = target.to_device(target.inputs(config, 6)[0])
    call = layer.forward_sorted
    if target.bound.apply_rows is None:
        refuses(Int8MoEError, lambda: call(x, torch.tensor([6, 0, 0, 0])), target.name, "apply_rows")
        return
    for counts in ([6, 0, 0], [5, 0, 0, 0], [7, 0, 0, 0], [7, -1, 0, 0], [6, 0, 0, 0, 0]):
        refuses(UnsupportedInputError, functools.partial(call, x, torch.tensor(counts)), "num_tokens_per_expert")
    fine = torch.tensor([1, 2, 3, 0])
    refuses(UnsupportedInputError, lambda: call(x[:, :-1], fine), "rows")
    refuses(UnsupportedInputError, lambda: call(x.double(), fine), "rows")
    refuses(UnsupportedInputError, lambda: call(x.to(torch.int8), fine), "rows")
    scales = target.to_device(torch.ones(6))
    refuses(UnsupportedInputError, lambda: call(x, fine, row_scales=scales), "row_scales")
    refuses(UnsupportedInputError, lambda: call(x.to(torch.int8), fine, row_scales=scales[:5]), "row_scales")
    # On another device: a kernel would take the address for one of its own.
    refuses(UnsupportedInputError, lambda: call(x.to("meta"), fine), "rows", "meta")
    refuses(UnsupportedInputError, lambda: call(x.to(torch.int8), fine, row_scales=scales.to("meta")), "row_scales")


def cases(grid: Grid) -> Iterator[Case]:
    """Make the cases; the grid makes no difference."""
    checks: dict[str, Callable[[Target], None]] = {
        f"input-{change}": functools.partial(_inputs, change=change) for change in _CHANGES
    }
    checks |= {
        "out": _out,
        "undeclared-dtype": _undeclared_dtype,
        "undeclared": _undeclared,
        "too-long-hidden_size": functools.partial(_too_long, field="hidden_size"),
        "too-long-intermediate_size": functools.partial(_too_long, field="intermediate_size"),
        "never-packed": _never_packed,
        "load-when-packed": _load_when_packed,
        "bad-weights": _bad_weights,
        "configs": _configs,
        "sorted-rows": _sorted_rows,
    }
    for name, run in checks.items():
        yield Case("refusals", name, run)
