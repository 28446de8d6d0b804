"""Process: what is the caller's, or the whole process's, is as it was when a kernel has been used."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Iterator

import torch
from torch import Tensor

from ...contracts import MoEConfig
from ..case import Case, Grid, skip
from ..makers import Experts, make_experts
from ..settings import Setting, settings
from ..target import Target


def _need_cpu(target: Target) -> None:
    if target.spec.device != "cpu":
        skip(f"device {target.spec.device}: its runtime has settings of its own")


def _left_alone(target: Target, setting: Setting) -> None:
    """Loading, packing, calls and restoring leave the setting as the caller made it."""
    _need_cpu(target)
    config = target.config()
    experts = make_experts(config, seed=131)
    work = [target.inputs(config, tokens, seed=tokens) for tokens in (1, 40)]
    _ = target.bound  # loading the kernel's module is not a call
    before = setting.get()
    try:
        for value in setting.values:
            setting.put(value)
            if setting.get() != value:
                skip(f"this machine cannot make {setting.text} {value}")
            _use(target, config, experts, work)
            assert setting.get() == value, f"the kernel changes {setting.text}, which is its caller's to set"
    finally:
        setting.put(before)


def _use(target: Target, config: MoEConfig, experts: Experts, work: list[tuple[Tensor, Tensor, Tensor]]) -> None:
    layer = target.layer(config, experts)
    for inputs in work:
        layer(*inputs)
    if target.bound.apply_rows is not None:
        layer.forward_sorted(work[-1][0], torch.tensor([40, 0, 0, 0]))
    if target.bound.restore_weights is not None:
        layer.restore_weights()


class _Memory(bytearray):
    """Bytes that can be referred to weakly."""


def _let_go(target: Target) -> None:
    """The memory of a call's inputs is free when the caller lets go of it and another call has been made."""
    _need_cpu(target)
    config = target.config()
    layer = target.layer(config, make_experts(config, seed=132))
    for dtype in target.dtypes:
        inputs = dict(
            zip(("hidden_states", "topk_weights", "topk_ids"), target.inputs(config, 5, dtype=dtype), strict=True)
        )
        memory = {name: _Memory(t.numel() * t.element_size()) for name, t in inputs.items()}
        held = {name: weakref.ref(own) for name, own in memory.items()}
        copies = [torch.frombuffer(memory[name], dtype=t.dtype).view(t.shape).copy_(t) for name, t in inputs.items()]
        target.forward(layer, *copies)
        del memory, copies
        target.forward(layer, *inputs.values())
        gc.collect()
        kept = [name for name, reference in held.items() if reference() is not None]
        assert not kept, f"{dtype}: the kernel keeps {', '.join(kept)} of a call that is over"


def cases(grid: Grid) -> Iterator[Case]:
    """Make the cases; the grid makes no difference."""
    for setting in settings():
        yield Case("process", setting.name, functools.partial(_left_alone, setting=setting))
    yield Case("process", "inputs-are-let-go", _let_go)
