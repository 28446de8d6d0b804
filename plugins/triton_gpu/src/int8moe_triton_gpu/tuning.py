"""Times tiles on the device that is here, and says which are best. What ``int8moe tune`` calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import triton

from int8moe.contracts import MoEConfig
from int8moe.errors import Int8MoEError

from . import forward
from .devices import Device, find_device
from .tiles import SCHEMA, Step, Tile, default_steps
from .tuned import TunedFile, file_name

_REPETITIONS_MS = 50

# Shared memory of one program, in bytes, beyond which a tile is not tried. A device may have less (sm_86, sm_89 and
# sm_120 have 99 KiB): the launch says so then, and the tile is passed over.
_SHARED = {"cuda": 160 * 1024, "hip": 64 * 1024}
_WIDTHS = (32, 64, 128, 256)
_DEPTHS = {"cuda": (64, 128, 256), "hip": (64, 128, 256)}
_STAGES = {"cuda": (2, 3, 4), "hip": (1, 2)}
_ACCUMULATORS = 128
"""int32 registers a lane may give to sums; with more the epilogue spills."""


class Timed(NamedTuple):
    """A step and what a forward took with it, in microseconds."""

    microseconds: float
    step: Step


def tune(config: MoEConfig, tokens: tuple[int, ...], report: Callable[[str], None]) -> dict[str, str]:
    """Measure for each number of tokens, and merge the best into one file.

    Args:
        config: the layer; weights are random, which takes its size on the device.
        tokens: numbers of tokens to tune for.
        report: is told what was found, a line each.

    Returns:
        {file name: text}.

    Raises:
        Int8MoEError: there is no device to measure on.
    """
    if not torch.cuda.is_available():
        raise Int8MoEError("tuning measures on a GPU, and torch finds none here; run it on the machine that will serve")
    place = torch.device("cuda", torch.cuda.current_device())
    device = find_device(place)
    layer = _random_layer(config, place)
    defaults = default_steps(device.family)
    one_row = defaults.one_row
    found: dict[int, Step] = {}
    microseconds: dict[str, float] = {}
    for count in sorted(set(tokens)):
        slots = count * config.top_k
        few = slots <= defaults.one_row_slots
        best = _best(layer, config, count, device, few)
        report(f"{count} tokens: {best.microseconds:.1f} us with {best.step.gate_up!r}, {best.step.down!r}")
        microseconds[str(count)] = best.microseconds
        if few:
            one_row = best.step
        else:
            found[max(1, -(-slots // config.local_experts))] = best.step
    steps = defaults.model_copy(update={"one_row": one_row, "sorted": _ascending(found) or defaults.sorted})
    document = TunedFile(
        schema_version=SCHEMA,
        device=device.name,
        architecture=device.architecture,
        triton=triton.__version__,
        num_experts=config.local_experts,
        intermediate_size=config.intermediate_size,
        hidden_size=config.hidden_size,
        steps=steps,
        microseconds=microseconds,
    )
    name = file_name(device, config.local_experts, config.intermediate_size, config.hidden_size)
    return {name: document.model_dump_json(indent=1) + "\n"}


def _ascending(found: dict[int, Step]) -> tuple[Step, ...]:
    rows = sorted(found)
    return tuple(found[row].model_copy(update={"rows_per_expert": None if row == rows[-1] else row}) for row in rows)


def _best(layer: forward.Layer, config: MoEConfig, tokens: int, device: Device, few: bool) -> Timed:
    """The fastest pair of tiles: first both alike, then GEMM2 on its own."""
    inputs = _inputs(layer, config, tokens)
    best: Timed | None = None
    heights = (16,) if few else (16, 32, 64, 128)
    for height in heights:
        for tile in candidates(device.kind, height, halves=2 if layer.gated else 1):
            best = _faster(best, layer, inputs, Step(rows_per_expert=None, gate_up=tile, down=tile), few)
    if best is None:
        raise Int8MoEError(f"no tile could be compiled for {device.name}")
    gate_up = best.step.gate_up
    for tile in candidates(device.kind, gate_up.block_m, halves=1):
        best = _faster(best, layer, inputs, Step(rows_per_expert=None, gate_up=gate_up, down=tile), few)
        assert best is not None
    return best


def candidates(kind: str, height: int, *, halves: int) -> Iterator[Tile]:
    """Tiles of one height that fit into shared memory and registers."""
    for width in _WIDTHS:
        for depth in _DEPTHS[kind]:
            for stages in _STAGES[kind]:
                for warps in (4, 8):
                    lanes = warps * (64 if kind == "hip" else 32)
                    if (height + halves * width) * depth * max(1, stages - (kind == "hip")) > _SHARED[kind]:
                        continue
                    if halves * height * width > _ACCUMULATORS * lanes:
                        continue
                    yield Tile(block_m=height, block_n=width, block_k=depth, num_warps=warps, num_stages=stages)


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _faster(best: Timed | None, layer: forward.Layer, inputs: Inputs, step: Step, few: bool) -> Timed | None:
    x, weights, ids, out = inputs
    slots = ids.numel() if few else 0
    steps = layer.steps.model_copy(update={"one_row_slots": slots, "one_row": step, "sorted": (step,)})
    trial = layer._replace(steps=steps)
    try:
        milliseconds = triton.testing.do_bench(
            lambda: forward.forward(trial, x, weights, ids, out, weight_on_input=False), rep=_REPETITIONS_MS
        )
    except triton.errors.TritonError:  # too large for this device, or refused by a compiler
        return best
    taken = Timed(1000.0 * milliseconds, step)
    return taken if best is None or taken.microseconds < best.microseconds else best


def _inputs(layer: forward.Layer, config: MoEConfig, tokens: int) -> Inputs:
    device = layer.w2.device
    x = torch.randn(tokens, layer.hidden, device=device).to(torch.bfloat16)
    ids = torch.rand(tokens, config.num_experts, device=device).topk(config.top_k, dim=1).indices
    weights = torch.rand(tokens, config.top_k, device=device)
    return x, weights, ids, torch.empty_like(x)


def _random_layer(config: MoEConfig, device: torch.device) -> forward.Layer:
    experts, hidden, inner = config.local_experts, config.hidden_size, config.intermediate_size

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-128, 128, shape, dtype=torch.int8, device=device)

    def floats(*shape: int) -> torch.Tensor:
        return torch.rand(shape, dtype=torch.float32, device=device) * 1e-3

    rows = config.w13_rows
    return forward.Layer(
        w13=integers(experts, rows, hidden),
        w13_scale=floats(experts, rows),
        w13_bias=floats(experts, rows) if config.has_bias else None,
        w2=integers(experts, hidden, inner),
        w2_scale=floats(experts, hidden),
        w2_bias=floats(experts, hidden) if config.has_bias else None,
        expert_map=None,
        num_experts=config.num_experts,
        activation=config.activation,
        gated=config.is_gated,
        alpha=config.swiglu_alpha,
        limit=config.swiglu_limit,
        steps=default_steps(find_device(device).family),
    )
