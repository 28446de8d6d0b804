"""Packing: lossless, idempotent, tagged, and independent of the tensors that were handed in."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...contracts import ACTIVATIONS, MoEConfig, WeightLayout
from ...errors import Int8MoEError, WeightLayoutError
from ..bits import assert_same_bits
from ..case import Case, Grid, skip
from ..makers import Experts, make_experts, reference_output
from ..target import Target
from .refusals import refuses

if TYPE_CHECKING:
    from ...layer import FusedMoE

_SIZES = (1, 2, 3, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 128, 129, 176, 255, 257)


def _buffers(layer: FusedMoE) -> dict[str, Tensor]:
    """Every tensor of the layer, as bytes where it is padded storage."""
    return {name: tensor.detach().clone() for name, tensor in layer.named_buffers()}


def _assert_same_buffers(actual: dict[str, Tensor], expected: dict[str, Tensor], context: str) -> None:
    assert actual.keys() == expected.keys(), f"{context}: tensors {sorted(actual)}, expected {sorted(expected)}"
    for name, tensor in expected.items():
        assert_same_bits(actual[name], tensor, f"{context}: {name}")


def _assert_canonical(layer: FusedMoE, experts: Experts, context: str) -> None:
    for name, tensor in experts.tensors().items():
        assert_same_bits(getattr(layer, name).cpu(), tensor, f"{context}: {name}")


def _need_restore(target: Target) -> None:
    if target.bound.restore_weights is None and target.spec.layout != "canonical":
        skip("the kernel has no restore_weights hook")


def _round_trip(target: Target, config: MoEConfig, seed: int) -> None:
    """unpack(pack(w)) == w, and packing again gives the same bytes."""
    _need_restore(target)
    experts = make_experts(config, seed=seed)
    layer = target.layer(config, experts)
    packed = _buffers(layer)
    layer.restore_weights()
    assert layer.weight_layout is None, "restored weights still carry a layout tag"
    _assert_canonical(layer, experts, "restored")
    layer.process_weights_after_loading()
    _assert_same_buffers(_buffers(layer), packed, "packed again")


def _full_range(target: Target) -> None:
    """Every weight value survives, in every column of a panel."""
    _need_restore(target)
    config = target.config(num_experts=1, top_k=1, hidden_size=259, intermediate_size=131)
    experts = make_experts(config)
    for weight in (experts.w13_weight, experts.w2_weight):
        weight.copy_(torch.arange(weight.numel()).remainder(256).sub(128).to(torch.int8).view(weight.shape))
    layer = target.layer(config, experts)
    layer.restore_weights()
    _assert_canonical(layer, experts, "restored")


def _twice(target: Target) -> None:
    config = target.config()
    experts = make_experts(config, seed=61)
    layer = target.layer(config, experts)
    packed, layout = _buffers(layer), layer.weight_layout
    layer.process_weights_after_loading()
    assert layer.weight_layout == layout, f"the second packing changed {layout} to {layer.weight_layout}"
    _assert_same_buffers(_buffers(layer), packed, "packed twice")
    target.check(layer, experts, target.inputs(config, 7, seed=62))


def _deterministic(target: Target) -> None:
    """Two fresh layers of the same weights hold the same bytes, padding included."""
    config = target.config(hidden_size=67, intermediate_size=33)
    experts = make_experts(config, seed=63)
    with_noise = torch.full((1 << 20,), 0x5A, dtype=torch.uint8)
    first = _buffers(target.layer(config, experts))
    del with_noise  # freed memory that is not zero: padding which is left unwritten would show
    _assert_same_buffers(_buffers(target.layer(config, experts)), first, "fresh layer")


def _reload(target: Target) -> None:
    """Load A, pack, reload with B: the bytes and the bits of a fresh layer of B."""
    config = target.config(hidden_size=65, intermediate_size=33)
    a, b = make_experts(config, seed=64), make_experts(config, seed=65)
    inputs = target.inputs(config, 9, seed=66)
    fresh = target.layer(config, b)
    layer = target.layer(config, a)
    target.check(layer, a, inputs, context="A")
    layer.reload_weights(**b.tensors())
    _assert_same_buffers(_buffers(layer), _buffers(fresh), "reloaded")
    target.check(layer, b, inputs, context="B")
    layer.reset()
    layer.load_weights(**a.tensors())
    layer.process_weights_after_loading()
    target.check(layer, a, inputs, context="A again")


def _failed_reload(target: Target) -> None:
    """A reload that is refused leaves the old weights in force."""
    config = target.config()
    a, b = make_experts(config, seed=67), make_experts(config, seed=68)
    layer = target.layer(config, a)
    wrong = b.tensors() | {"w2_weight_scale": torch.full_like(b.w2_weight_scale, float("nan"))}
    refuses(WeightLayoutError, lambda: layer.reload_weights(**wrong), "w2_weight_scale")
    target.check(layer, a, target.inputs(config, 5, seed=69), context="after a refused reload")


def _wrong_tag(target: Target) -> None:
    """Weights under another tag are refused: other layout, other version, other numerics."""
    config = target.config()
    experts = make_experts(config, seed=70)
    inputs = target.inputs(config, 3, seed=71)
    layer = target.layer(config, experts)
    layout = layer.weight_layout
    assert layout is not None
    for change in (
        {"name": "u8_n999k9"},
        {"namespace": "somebody"},
        {"version": layout.version + 1},
        {"numerics_version": layout.numerics_version + 1},
    ):
        other = WeightLayout(**(layout.model_dump() | change))
        layer.layout = other
        refuses(WeightLayoutError, lambda: target.forward(layer, *inputs), other.tag)
    layer.layout = layout
    target.check(layer, experts, inputs, context="right tag again")


def _wrong_tag_in_state(target: Target) -> None:
    """A state_dict under another tag is refused."""
    config = target.config()
    state = target.layer(config, make_experts(config)).state_dict()
    key = next(key for key in state if key.endswith("_extra_state"))
    state[key]["layout"]["version"] += 1
    other = WeightLayout(**state[key]["layout"])
    layer = target.layer(config, packed=False)
    refuses(WeightLayoutError, lambda: layer.load_state_dict(state), other.tag)


def _state_dict(target: Target) -> None:
    """A packed state goes into a layer that was never loaded, and gives the same bits."""
    config = target.config(hidden_size=65, intermediate_size=33)
    experts = make_experts(config, seed=72)
    source = target.layer(config, experts)
    state = {key: value.clone() if isinstance(value, Tensor) else value for key, value in source.state_dict().items()}
    layer = target.empty_layer(config)
    layer.load_state_dict(state)
    assert layer.weight_layout == source.weight_layout, f"{layer.weight_layout}, expected {source.weight_layout}"
    target.check(layer, experts, target.inputs(config, 6, seed=73))


def _caller_keeps_nothing(target: Target) -> None:
    """The caller's tensors are neither kept nor written, and changing them later changes nothing."""
    config = target.config()
    experts = make_experts(config, seed=74)
    kept = experts.clone()
    layer = target.layer(config, experts)
    for name, tensor in kept.tensors().items():
        assert_same_bits(experts.tensors()[name], tensor, f"the caller's {name} is unchanged")
    inputs = target.inputs(config, 8, seed=75)
    expected = reference_output(config, kept, *inputs)
    for tensor in experts.tensors().values():
        tensor.zero_()
    target.match(target.forward(layer, *inputs), expected, "the caller's tensors were zeroed")
    references = [weakref.ref(tensor) for tensor in experts.tensors().values()]
    storages = {t.untyped_storage().data_ptr() for t in experts.tensors().values()}
    shared = [n for n, t in layer.named_buffers() if t.untyped_storage().data_ptr() in storages]
    assert not shared, f"the layer's {shared} share memory with the caller's tensors"
    del experts, tensor
    gc.collect()
    assert not any(reference() is not None for reference in references), "the layer keeps the caller's tensors"


def _one_by_one(target: Target) -> None:
    """Experts loaded one by one, last first, equal those loaded at once."""
    config = target.config(num_experts=5, hidden_size=65, intermediate_size=33)
    experts = make_experts(config, seed=76)
    whole = target.layer(config, experts)
    layer = target.layer(config, experts)
    layer.reset()
    for expert in reversed(range(5)):
        layer.load_expert_weights(expert, **{name: t[expert] for name, t in experts.tensors().items()})
    layer.process_weights_after_loading()
    _assert_same_buffers(_buffers(layer), _buffers(whole), "loaded one by one")
    target.check(layer, experts, target.inputs(config, 6, seed=77))


def _interleaved(target: Target, bias: bool) -> None:
    """gate_up_layout="interleaved" with distinct constants is the stacked layer."""
    gated = [a for a in target.activations if not a.endswith("_no_mul")]
    if not gated:
        skip("no activation with a gate is declared")
    config = target.config(activation=gated[0], hidden_size=33, intermediate_size=17, has_bias=bias)
    experts = make_experts(config, seed=78)
    stacked = target.layer(config, experts)
    mixed: dict[str, Any] = {
        name: torch.stack(t.chunk(2, dim=1), dim=2).flatten(1, 2) if name.startswith("w13") else t
        for name, t in experts.tensors().items()
    }
    layer = target.layer(config, experts)
    layer.reset()
    layer.load_weights(**mixed, gate_up_layout="interleaved")
    layer.process_weights_after_loading()
    _assert_same_buffers(_buffers(layer), _buffers(stacked), "interleaved")
    target.check(layer, experts, target.inputs(config, 6, seed=79))
    layer.reload_weights(**mixed)
    assert not torch.equal(
        target.forward(layer, *target.inputs(config, 6, seed=79)),
        target.forward(stacked, *target.inputs(config, 6, seed=79)),
    ), "rows that are interleaved are de-interleaved without being told"


def _copies(target: Target, how: str) -> None:
    """deepcopy, pickle and dtype moves of a packed layer give the same bits, or are refused by name."""
    config = target.config(hidden_size=65, intermediate_size=33)
    experts = make_experts(config, seed=80)
    layer = target.layer(config, experts)
    inputs = target.inputs(config, 6, seed=81)
    expected = target.check(layer, experts, inputs)
    makers: dict[str, Callable[[], FusedMoE]] = {
        "deepcopy": lambda: copy.deepcopy(layer),
        "pickle": lambda: pickle.loads(pickle.dumps(layer)),
        "bfloat16": lambda: layer.to(torch.bfloat16),
        "half": lambda: layer.half(),
        "double": lambda: layer.double(),
    }
    try:
        copied = makers[how]()
    except Int8MoEError as error:
        skip(f"{how} is refused by name: {error}")
    assert copied.w13_weight_scale.dtype == torch.float32, f"scales became {copied.w13_weight_scale.dtype}"
    target.match(target.forward(copied, *inputs), expected, how)
    if copied is not layer:
        layer.reset()
        target.match(target.forward(copied, *inputs), expected, f"{how}, the original is gone")


def cases(grid: Grid) -> Iterator[Case]:
    """Make the cases."""
    case = functools.partial(Case, "packing")
    sizes = _SIZES if grid != "reduced" else (1, 16, 33, 100, 129)
    for number, hidden in enumerate(sizes):
        # Two walks through the sizes at different paces: every size meets others, on both sides.
        for inner in {sizes[(5 * number + 3) % len(sizes)], sizes[-1 - number]} if grid != "all" else sizes:
            config = MoEConfig(
                num_experts=1 + number % 3,
                top_k=1,
                hidden_size=hidden,
                intermediate_size=inner,
                activation=ACTIVATIONS[0 if number % 4 else 4],
                has_bias=number % 3 == 1,
            )
            yield case(f"round-trip-H{hidden}-I{inner}", functools.partial(_round_trip, config=config, seed=number))
    checks: dict[str, Callable[[Target], None]] = {
        "full-range": _full_range,
        "twice": _twice,
        "deterministic": _deterministic,
        "reload": _reload,
        "refused-reload": _failed_reload,
        "wrong-tag": _wrong_tag,
        "wrong-tag-in-state": _wrong_tag_in_state,
        "state-dict": _state_dict,
        "callers-tensors": _caller_keeps_nothing,
        "one-by-one": _one_by_one,
        "interleaved": functools.partial(_interleaved, bias=False),
        "interleaved-bias": functools.partial(_interleaved, bias=True),
    }
    checks |= {how: functools.partial(_copies, how=how) for how in ("deepcopy", "pickle", "bfloat16", "half", "double")}
    for name, run in checks.items():
        yield case(name, run)
