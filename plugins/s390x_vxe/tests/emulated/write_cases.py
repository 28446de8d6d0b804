"""Writes layers, calls and the bits of the reference for check_cases.py: the grid of the conformance suite, and rows that
are hard on native code. Runs where torch is; the file is read where it is not.

    python write_cases.py FILE.npz --grid reduced
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from int8moe import reference
from int8moe.contracts import MoEConfig
from int8moe.native import abi
from int8moe.testing import Experts, make_experts, make_hidden_states, make_routing, reference_output
from int8moe.testing.case import GRIDS, Grid
from int8moe.testing.groups.bits import grid_layers, local_map
from int8moe_s390x_vxe import packing

CODES = {
    torch.float32: abi.F32, torch.bfloat16: abi.BF16, torch.float16: abi.F16, torch.int8: abi.I8,
    torch.int32: abi.I32, torch.int64: abi.I64,
}  # fmt: skip


class Call(NamedTuple):
    """One call and its answer; ``scales`` and ``counts`` instead of weights and ids: rows that are sorted by expert."""

    x: Tensor
    expected: Tensor
    weights: Tensor | None = None
    ids: Tensor | None = None
    scales: Tensor | None = None
    counts: Tensor | None = None


class Layer(NamedTuple):
    """One layer and its calls."""

    name: str
    config: MoEConfig
    experts: Experts
    calls: list[Call]


def _call(config: MoEConfig, experts: Experts, x: Tensor, weights: Tensor, ids: Tensor) -> Call:
    expected = reference_output(config, experts, x, weights, ids, expert_map=local_map(config))
    return Call(x, expected, weights, ids)


def _rows_call(config: MoEConfig, experts: Experts, x: Tensor, counts: Tensor, scales: Tensor | None = None) -> Call:
    """The answer expert by expert."""
    q, s = reference.quantize_rows(x.to(torch.float32)) if scales is None else (x, scales)
    stops = counts.cumsum(0).tolist()
    parts = [slice(stop - count, stop) for stop, count in zip(stops, counts.tolist(), strict=True)]
    expected = [
        reference.expert_rows(
            q[part], s[part], experts.w13_weight[e], experts.w13_weight_scale[e],
            None if experts.w13_bias is None else experts.w13_bias[e],
            experts.w2_weight[e], experts.w2_weight_scale[e],
            None if experts.w2_bias is None else experts.w2_bias[e],
            activation=config.activation, swiglu_alpha=config.swiglu_alpha, swiglu_limit=config.swiglu_limit,
        )
        for e, part in enumerate(parts)
    ]  # fmt: skip
    return Call(x, torch.cat(expected), scales=scales, counts=counts)


def from_grid(grid: Grid, first: int = 0, last: int | None = None) -> Iterator[Layer]:
    """The layers [first, last) of the conformance suite."""
    for layer in itertools.islice(grid_layers(grid), first, last):
        experts = make_experts(layer.config, seed=layer.seed)
        calls = [_call(layer.config, experts, *call.inputs(layer.config)) for call in layer.calls]
        yield Layer(layer.name, layer.config, experts, calls)


def hard_rows() -> Iterator[Layer]:
    """Weights and activations at the ends of their range, special values, rows that come sorted."""
    config = MoEConfig(num_experts=2, top_k=1, hidden_size=2048, intermediate_size=48)
    experts = make_experts(config)
    for weight in (experts.w13_weight, experts.w2_weight):
        weight[0], weight[1] = -128, torch.where(weight[1] < 0, -128, 127).to(torch.int8)
    # -128 * -128 twice is more than a lane of 16 bits holds.
    extreme = torch.full((9, 2048), -128, dtype=torch.int8)
    extreme[4:7] = torch.where(torch.arange(2048) % 3 == 0, -128, 127).to(torch.int8)
    calls = [_rows_call(config, experts, extreme, torch.tensor([5, 4]), torch.rand(9) * 1e-4)]
    yield Layer("extreme-rows", config, experts, calls)

    config = MoEConfig(num_experts=1, top_k=1, hidden_size=64, intermediate_size=64)
    experts = make_experts(config)
    experts.w13_weight[:, :64], experts.w13_weight[:, 64:], experts.w2_weight[:] = 1, -128, -128
    experts.w13_weight_scale[:, :64], experts.w13_weight_scale[:, 64:], experts.w2_weight_scale[:] = 1, 1 / 128, 1 / 128
    calls = []
    for tokens in (1, 2, 3, 4, 5, 16, 17):
        x, ids = torch.ones(tokens, 64), torch.zeros(tokens, 1, dtype=torch.int64)
        calls.append(_call(config, experts, x, torch.ones(tokens, 1), ids))
    yield Layer("full-weight-range", config, experts, calls)

    for activation, bias in (("silu", False), ("gelu", True), ("swigluoai", False), ("relu2_no_mul", True)):
        config = MoEConfig(num_experts=3, top_k=2, hidden_size=100, intermediate_size=33, activation=activation,
                           has_bias=bias)  # fmt: skip
        experts = make_experts(config, seed=7)
        calls = []
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = make_hidden_states(14, 100, dtype=torch.float32)
            x[0], x[1], x[2], x[3], x[4] = 0.0, -0.0, 1e-39, 2.0**-126, 6e-5
            x[5], x[6], x[7] = torch.arange(100) - 49.5, 60000.0, 65519.9  # half-way cases; the ends of fp16
            x[5, 0] = 127.0
            x[8, 50], x[9, 50], x[10, 99] = float("nan"), float("inf"), float("-inf")
            weights, ids = make_routing(14, 3, 2)
            ids[0], ids[12, 0], ids[13] = 3, -1, -5
            calls.append(_call(config, experts, x.to(dtype), weights, ids))
            calls.append(_rows_call(config, experts, x.to(dtype), torch.tensor([6, 0, 8], dtype=torch.int32)))
        yield Layer(f"special-rows-{activation}", config, experts, calls)


def _array(tensor: Tensor) -> np.ndarray:
    if tensor.dtype in (torch.bfloat16, torch.float16):
        tensor = tensor.view(torch.int16)  # bits: numpy has no bf16
    return tensor.contiguous().numpy()


def write(path: str | Path, layers: Iterable[Layer]) -> int:
    """Write the file; returns the number of layers."""
    arrays: dict[str, np.ndarray] = {}
    index: list[dict[str, Any]] = []
    for number, (name, config, experts, calls) in enumerate(layers):
        mapping = local_map(config)
        tensors = experts.tensors() | ({} if mapping is None else {"expert_map": mapping})
        tensors["w13_packed"] = packing.pack(experts.w13_weight, 2 if config.is_gated else 1)
        tensors["w2_packed"] = packing.pack(experts.w2_weight)
        arrays |= {f"{number}/{key}": _array(tensor) for key, tensor in tensors.items()}
        index.append({"name": name, "config": config.model_dump(mode="json"), "tensors": list(tensors), "calls": []})
        for position, call in enumerate(calls):
            given = {key: tensor for key, tensor in call._asdict().items() if tensor is not None}
            arrays |= {f"{number}/{position}/{key}": _array(tensor) for key, tensor in given.items()}
            index[-1]["calls"].append({key: CODES[tensor.dtype] for key, tensor in given.items()})
    np.savez(path, index=np.array(json.dumps(index)), **arrays)
    return len(index)


def main() -> None:
    """Write the layers [FIRST, LAST) of a grid, and before the first of all the hard rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--grid", choices=GRIDS, default="reduced")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--last", type=int)
    options = parser.parse_args()
    layers = from_grid(options.grid, options.first, options.last)
    count = write(options.file, itertools.chain(hard_rows() if options.first == 0 else (), layers))
    print(f"{options.file}: {count} layers")


if __name__ == "__main__":
    main()
