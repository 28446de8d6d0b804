"""The layer and its inputs. Every worker makes the same ones from seeds, whatever its build of torch.

Only integers are drawn; what follows is exact or one correctly rounded operation. Scales are powers of two and each row
of a weight holds a 127, so that a peer which quantises from bf16 itself arrives at the same int8 weights.
"""

from __future__ import annotations

import ctypes
import math
import zlib
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shapes import Shape


class Weights(NamedTuple):
    """One layer: int8 weights with one scale a row."""

    w13: Tensor
    """[E, 2I, H] int8, gate rows first."""
    w13_scale: Tensor
    """[E, 2I] float32."""
    w2: Tensor
    """[E, H, I] int8."""
    w2_scale: Tensor
    """[E, H] float32."""

    def bf16(self) -> tuple[Tensor, Tensor]:
        """The same numbers as [E, 2I, H] and [E, H, I] in bfloat16, exact."""
        pairs = ((self.w13, self.w13_scale), (self.w2, self.w2_scale))
        w13, w2 = (weight.bfloat16().mul_(scale.bfloat16().unsqueeze(-1)) for weight, scale in pairs)
        return w13, w2


class Call(NamedTuple):
    """Inputs of one call."""

    hidden_states: Tensor
    """[M, H] bfloat16."""
    topk_ids: Tensor
    """[M, k] int32, no expert twice in a row."""
    topk_weights: Tensor
    """[M, k] float32, each row sums to 1."""


def make_weights(shape: Shape, seed: int) -> Weights:
    """Random weights whose layer keeps the size of its input (a standard deviation near 1)."""
    generator = torch.Generator().manual_seed(seed)

    def matrices(rows: int, columns: int) -> tuple[Tensor, Tensor]:
        count = shape.num_experts * rows * columns
        words = torch.empty(math.ceil(count / 8), dtype=torch.int64).random_(-(2**63), None, generator=generator)
        weight = words.view(torch.int8)[:count].view(shape.num_experts, rows, columns)
        weight.clamp_(min=-127)
        weight[:, :, 0] = 127
        middle = -6 - round(math.log2(columns) / 2)
        scales = torch.tensor([2.0 ** (middle + step) for step in (-1, 0, 1)])
        return weight, scales[torch.randint(0, 3, (shape.num_experts, rows), generator=generator)]

    w13, w13_scale = matrices(2 * shape.intermediate_size, shape.hidden_size)
    w2, w2_scale = matrices(shape.hidden_size, shape.intermediate_size)
    return Weights(w13, w13_scale, w2, w2_scale)


def make_calls(shape: Shape, tokens: int, layers: int, count: int) -> list[Call]:
    """Inputs of ``count`` calls that walk over the layers.

    With one token the experts of a layer are dealt, none again before all had their turn: weights come from memory and
    not from a cache. With more tokens each one chooses at random.
    """
    generator = torch.Generator().manual_seed(tokens)
    decks: list[list[int]] = [[] for _ in range(layers)]
    calls = []
    for number in range(count):
        if tokens == 1:
            deck = decks[number % layers]
            if len(deck) < shape.top_k:
                deck[:] = torch.randperm(shape.num_experts, generator=generator).tolist()
            rows = [[deck.pop() for _ in range(shape.top_k)]]
        else:
            rows = [
                torch.randperm(shape.num_experts, generator=generator)[: shape.top_k].tolist() for _ in range(tokens)
            ]
        # The sum of four even draws is close to normal; 1155 is its standard deviation.
        draws = torch.randint(-1000, 1001, (4, tokens, shape.hidden_size), generator=generator, dtype=torch.int32)
        hidden_states = draws.sum(0).float().div_(1155).bfloat16()
        weights = torch.randint(1, 1025, (tokens, shape.top_k), generator=generator).float()
        weights /= weights.sum(1, keepdim=True)
        calls.append(Call(hidden_states, torch.tensor(rows, dtype=torch.int32), weights))
    return calls


def checksum(tensors: Iterable[Tensor], start: int = 0) -> int:
    """CRC of the bytes of contiguous tensors: workers that agree on it did the same work."""
    for tensor in tensors:
        assert tensor.is_contiguous()
        count = tensor.numel() * tensor.element_size()
        start = zlib.crc32((ctypes.c_ubyte * count).from_address(tensor.data_ptr()), start)
    return start


def reference(weights: Weights, call: Call) -> Tensor:
    """The layer [M, H] in float32 with the quantised weights and unquantised activations; sums in float64."""
    x = call.hidden_states.float()
    out = torch.zeros(x.shape, dtype=torch.float64)
    for expert in call.topk_ids.unique().tolist():
        token, slot = (call.topk_ids == expert).nonzero(as_tuple=True)
        gate_up = F.linear(x[token], weights.w13[expert].float() * weights.w13_scale[expert].unsqueeze(1))
        gate, up = gate_up.chunk(2, -1)
        y = F.linear(F.silu(gate) * up, weights.w2[expert].float() * weights.w2_scale[expert].unsqueeze(1))
        out.index_add_(0, token, y.double() * call.topk_weights[token, slot].unsqueeze(1))
    return out


def relative_l2(found: Tensor, wanted: Tensor) -> float:
    """|found - wanted| / |wanted|."""
    return float((found.double() - wanted).norm() / wanted.norm())
