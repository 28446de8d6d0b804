"""Operator contract: opcheck, compile, export, modes, aliasing, no mutation, no gradient."""

from __future__ import annotations

import functools
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ... import ops
from ...errors import Int8MoEError
from ..bits import assert_same_bits
from ..case import Case, Grid, skip
from ..makers import make_experts, make_layer, threads
from ..target import Target
from .bits import local_map
from .declaration import python
from .refusals import refuses

if TYPE_CHECKING:
    from ...layer import FusedMoE


def _arguments(layer: FusedMoE, inputs: Iterable[Tensor]) -> tuple[Any, ...]:
    return (
        *inputs,
        layer.w13_weight, layer.w13_weight_scale, layer.w13_bias,
        layer.w2_weight, layer.w2_weight_scale, layer.w2_bias,
        layer.expert_map, [layer.aux[name] for name in layer.aux], list(layer.aux),
        *ops.op_arguments(layer, layer.kernel.name),
    )  # fmt: skip


def _need_cpu(target: Target) -> None:
    if target.spec.device != "cpu":
        skip(f"device {target.spec.device}")


def _opcheck(target: Target, **fields: Any) -> None:
    _need_cpu(target)
    config = target.config(**fields)
    layer = target.layer(config, expert_map=local_map(config))
    for dtype in target.dtypes:
        inputs = target.inputs(config, 5, dtype=dtype)
        torch.library.opcheck(torch.ops.int8moe.fused_experts.default, _arguments(layer, inputs))


def _operator_equals_layer(target: Target, **fields: Any) -> None:
    """The operator and the layer's direct call give the same bits."""
    config = target.config(**fields)
    experts = make_experts(config, seed=101)
    layer = target.layer(config, experts, expert_map=local_map(config))
    for tokens in (0, 1, 6, 40):
        inputs = target.inputs(config, tokens, seed=tokens)
        expected = target.check(layer, experts, inputs, expert_map=local_map(config))
        actual = torch.ops.int8moe.fused_experts(*_arguments(layer, map(target.to_device, inputs)))
        target.match(actual.cpu(), expected, f"operator, M {tokens}")


class _Backend:
    """Compiles through AOT autograd, with eager code at the end, and counts graphs."""

    def __init__(self) -> None:
        self.graphs = 0
        self._inner = torch._dynamo.lookup_backend("aot_eager")

    def __call__(self, module: Any, inputs: Any, **options: Any) -> Any:
        self.graphs += 1
        return self._inner(module, inputs, **options)


def _dynamo() -> None:
    import torch._dynamo

    torch._dynamo.reset()


def _compile_dynamic(target: Target) -> None:
    """One compile serves M = 2, 3, 64, in one graph without breaks."""
    _need_cpu(target)
    _dynamo()
    # No size equals 2, 3 or 64: torch gives dimensions that are equal in the first call one symbol.
    config = target.config(num_experts=8, top_k=4, hidden_size=96)
    experts = make_experts(config, seed=102)
    layer = target.layer(config, experts)
    backend = _Backend()
    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=True)
    for dtype in target.dtypes[:1]:
        for tokens in (2, 3, 64):
            inputs = target.inputs(config, tokens, seed=tokens, dtype=dtype)
            expected = target.check(layer, experts, inputs)
            with torch.no_grad():
                target.match(compiled(*inputs), expected, f"compiled, M {tokens}")
    assert backend.graphs == 1, f"{backend.graphs} compiles for M = 2, 3, 64, expected one"


def _compile_inside(target: Target) -> None:
    """Compiled within a model that does work before and after it."""
    _need_cpu(target)
    _dynamo()
    config = target.config()
    experts = make_experts(config, seed=103)
    layer = target.layer(config, experts)
    backend = _Backend()

    def block(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        result: Tensor = layer(x * 2, weights, ids)
        return result + x

    compiled = torch.compile(block, backend=backend, fullgraph=True, dynamic=True)
    for tokens in (4, 9):
        x, weights, ids = target.inputs(config, tokens, seed=tokens)
        expected = target.check(layer, experts, (x * 2, weights, ids)) + x
        with torch.no_grad():
            target.match(compiled(x, weights, ids), expected, f"M {tokens}")
    assert backend.graphs == 1, f"{backend.graphs} compiles, expected one"


def _compile_many_layers(target: Target) -> None:
    """48 layers compiled one by one make at most 2 graphs."""
    _need_cpu(target)
    _dynamo()
    config = target.config(num_experts=2, hidden_size=16, intermediate_size=16)
    backend = _Backend()
    inputs = target.inputs(config, 4, seed=104)
    for number in range(48):
        experts = make_experts(config, seed=number)
        layer = target.layer(config, experts)
        compiled = torch.compile(layer, backend=backend, fullgraph=True)
        with torch.no_grad():
            actual = compiled(*inputs)
        target.match(actual, target.forward(layer, *inputs), f"layer {number}")
    assert backend.graphs <= 2, f"{backend.graphs} graphs for 48 layers, expected at most 2"
    _dynamo()


_RUN_EXPORTED = """
import sys
import torch
import int8moe.ops
from int8moe.testing import assert_same_bits
program = torch.export.load(sys.argv[1])
work = torch.load(sys.argv[2])
module = program.module()
with torch.no_grad():
    for inputs, expected in work:
        assert_same_bits(module(*inputs), expected, f"M {len(inputs[0])}")
print("equal")
"""


def _export(target: Target) -> None:
    """torch.export, saved, reloaded in a fresh process, run with other M."""
    _need_cpu(target)
    if target.live:
        skip("registered live: a fresh process cannot find it")
    config = target.config(hidden_size=65, intermediate_size=33)
    experts = make_experts(config, seed=105)
    layer = target.layer(config, experts)
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    with torch.no_grad():
        program = torch.export.export(
            layer,
            target.inputs(config, 4, seed=106),
            dynamic_shapes=({0: tokens}, {0: tokens}, {0: tokens}),
        )
        work = []
        for count in (2, 4, 33):
            inputs = target.inputs(config, count, seed=count)
            work.append((inputs, target.check(layer, experts, inputs)))
            # The kernel's own bits: a tolerance is no excuse for an export that differs.
            work[-1] = inputs, target.forward(layer, *inputs)
            target.match(program.module()(*inputs), work[-1][1], f"exported, M {count}")
    with tempfile.TemporaryDirectory() as folder:
        path, values = Path(folder, "layer.pt2"), Path(folder, "work.pt")
        torch.export.save(program, path)
        torch.save(work, values)
        assert "equal" in python(_RUN_EXPORTED, str(path), str(values))


def _nothing_written(target: Target) -> None:
    """No input is written, the weights are not either, and the result is memory of its own."""
    config = target.config()
    layer = target.layer(config)
    inputs = tuple(map(target.to_device, target.inputs(config, 7, seed=107)))
    kept = [tensor.clone() for tensor in inputs]
    weights = {name: tensor.clone() for name, tensor in layer.named_buffers()}
    with torch.no_grad():
        first = layer(*inputs)
        second = layer(*inputs)
    for before, after in zip(kept, inputs, strict=True):
        assert_same_bits(after, before, "inputs are unchanged")
    for name, tensor in layer.named_buffers():
        assert_same_bits(tensor, weights[name], f"{name} is unchanged")
    owned = [*inputs, *layer.buffers(), second]
    place = first.untyped_storage().data_ptr()
    assert all(t.untyped_storage().data_ptr() != place for t in owned), "the result shares memory"
    first.fill_(1.0)
    with torch.no_grad():
        assert_same_bits(layer(*inputs), second, "writing into a result changes the next one")


def _versions(target: Target) -> None:
    """Writes that leave the values as they were are writes too: autograd's version counters stay."""
    config = target.config()
    layer = target.layer(config)
    inputs = target.inputs(config, 3, seed=108)
    before = [tensor._version for tensor in inputs]
    target.forward(layer, *inputs)
    assert [tensor._version for tensor in inputs] == before, "an input was written in place"


def _out(target: Target) -> None:
    """``out`` is written and returned, contiguous or not, also when it is the input itself."""
    _need_cpu(target)
    config = target.config()
    experts = make_experts(config, seed=109)
    layer = target.layer(config, experts)
    inputs = target.inputs(config, 6, seed=110)
    expected = target.check(layer, experts, inputs)
    x, weights, ids = inputs
    own = x.clone()
    with torch.no_grad():
        for name, out in (
            ("contiguous", torch.full_like(x, 9.0)),
            ("column slice", torch.full((6, 100), 9.0, dtype=x.dtype)[:, 10:74]),
            ("transposed", torch.full((64, 6), 9.0, dtype=x.dtype).t()),
        ):
            assert layer(x, weights, ids, out=out) is out, f"{name}: the result is not out"
            target.match(out, expected, f"out {name}")
        layer(own, weights, ids, out=own)
    target.match(own, expected, "out is the input")


def _leading_dimensions(target: Target) -> None:
    """hidden_states of more dimensions, or one, is flattened and put back."""
    config = target.config()
    experts = make_experts(config, seed=111)
    layer = target.layer(config, experts)
    inputs = target.inputs(config, 12, seed=112)
    expected = target.check(layer, experts, inputs)
    for lead in ((3, 4), (2, 3, 2), (12, 1)):
        actual = target.forward(layer, *(t.reshape(*lead, -1) for t in inputs))
        target.match(actual, expected.reshape(*lead, -1), f"leading dimensions {lead}")
    one = target.forward(layer, *(t[0] for t in inputs))
    target.match(one, expected[0], "one row without a leading dimension")


def _modes(target: Target) -> None:
    """inference_mode, no_grad, grad mode, autocast, another default dtype, filled empties: the same bits."""
    _need_cpu(target)
    config = target.config()
    experts = make_experts(config, seed=113)
    layer = target.layer(config, experts)
    inputs = target.inputs(config, 20, seed=114)
    expected = target.check(layer, experts, inputs)
    with torch.inference_mode():
        target.match(layer(*inputs).clone(), expected, "inference_mode")
        made_inside = make_layer(config, kernel=target.name, experts=experts)
    target.match(target.forward(made_inside, *inputs), expected, "a layer made in inference_mode")
    with torch.enable_grad():
        target.match(layer(*inputs), expected, "grad mode")
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        target.match(layer(*inputs), expected, "autocast")
    for dtype in (torch.float64, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            target.match(target.forward(layer, *inputs), expected, f"default dtype {dtype}")
            again = make_layer(config, kernel=target.name, experts=experts)
            target.match(target.forward(again, *inputs), expected, f"made under default dtype {dtype}")
        finally:
            torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(True)  # fills every torch.empty with NaN
    try:
        target.match(target.forward(layer, *inputs), expected, "torch.empty filled with NaN")
    finally:
        torch.use_deterministic_algorithms(False)


def _no_gradient(target: Target) -> None:
    """Backward raises a clear error, whichever input wants a gradient."""
    _need_cpu(target)
    config = target.config()
    experts = make_experts(config, seed=115)
    layer = target.layer(config, experts)
    x, weights, ids = target.inputs(config, 4, seed=116)
    expected = target.check(layer, experts, (x, weights, ids))
    for name in ("hidden_states", "topk_weights"):
        first, second = x.clone(), weights.clone()
        (first if name == "hidden_states" else second).requires_grad_(True)
        output = layer(first, second, ids)
        target.match(output.detach(), expected, f"{name} wants a gradient")
        refuses(Int8MoEError, output.sum().backward, "inference")


def _concurrent(target: Target) -> None:
    """Calls from several Python threads at once give the bits of calls one by one."""
    config = target.config(hidden_size=129, intermediate_size=65)
    experts = make_experts(config, seed=117)
    layer = target.layer(config, experts)
    work = [target.inputs(config, tokens, seed=tokens) for tokens in (1, 7, 33, 64)]
    expected = [target.check(layer, experts, inputs) for inputs in work]
    results: list[list[Tensor]] = [[] for _ in work]

    def repeat(index: int) -> None:
        for _ in range(8):
            results[index].append(target.forward(layer, *work[index]))

    workers = [threading.Thread(target=repeat, args=(index,)) for index in range(len(work))]
    with threads(2):
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    for index, outputs in enumerate(results):
        assert len(outputs) == 8, f"a thread ended early, after {len(outputs)} of 8 calls"
        for output in outputs:
            target.match(output, expected[index], f"thread {index}")


def cases(grid: Grid) -> Iterator[Case]:
    """Make the cases."""
    checks: dict[str, Callable[[Target], None]] = {
        "opcheck": _opcheck,
        "opcheck-bias": functools.partial(_opcheck, has_bias=True),
        "opcheck-map": functools.partial(_opcheck, has_expert_map=True, num_local_experts=2),
        "operator-equals-layer": _operator_equals_layer,
        "operator-equals-layer-bias": functools.partial(_operator_equals_layer, has_bias=True, hidden_size=65),
        "operator-equals-layer-map": functools.partial(
            _operator_equals_layer, has_expert_map=True, num_local_experts=2, intermediate_size=33
        ),
        "compile-dynamic": _compile_dynamic,
        "compile-inside-a-model": _compile_inside,
        "compile-48-layers": _compile_many_layers,
        "export": _export,
        "nothing-written": _nothing_written,
        "versions": _versions,
        "out": _out,
        "leading-dimensions": _leading_dimensions,
        "modes": _modes,
        "no-gradient": _no_gradient,
        "concurrent": _concurrent,
    }
    for name, run in checks.items():
        yield Case("operator", name, run)
