"""Write check_vectors' file: small layers, their inputs, and the bits that the reference gives.

    python write_vectors.py OUT.bin

Shapes lie off every grid (16 columns, 64 depths, rows per tile), every activation, dtype, bias, expert map, dropped
slots and special rows occur. Little-endian throughout.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from int8moe import reference
from int8moe.contracts import ACTIVATIONS

MAGIC, FORMAT = 0x564D3849, 1
CODES = {
    torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3, torch.int32: 4, torch.int64: 5,
}  # fmt: skip
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def _array(tensor: Tensor | None) -> bytes:
    if tensor is None:
        return struct.pack("<qq", 0, 0)
    tensor = tensor.contiguous()
    size = tensor.element_size()
    raw = bytes(tensor.view(torch.uint8).flatten().tolist()) if tensor.numel() else b""
    if sys.byteorder == "big":
        raw = b"".join(raw[i : i + size][::-1] for i in range(0, len(raw), size))
    return struct.pack("<qq", size, tensor.numel()) + raw


class Case:
    """One layer and one call; deterministic in its name."""

    def __init__(self, name: str, tokens: int, top_k: int, experts: int, hidden: int, inner: int, **options):
        self.name = name
        self.random = torch.Generator().manual_seed(sum(name.encode()) * 7919 + hidden * 31 + inner)
        self.dtype = options.pop("dtype", F32)
        self.weights_dtype = options.pop("weights_dtype", F32)
        self.ids_dtype = options.pop("ids_dtype", torch.int64)
        self.activation = options.pop("activation", "silu")
        self.on_input = options.pop("on_input", False)
        self.alpha, self.limit = options.pop("swiglu", (1.702, 7.0))
        self.rows = options.pop("rows", None)  # None, "float" or "int8"
        special, bias, mapped, extreme, x = (
            options.pop(key, default)
            for key, default in (
                ("special", False),
                ("bias", False),
                ("mapped", False),
                ("extreme", False),
                ("x", None),
            )
        )
        self.extreme = extreme
        ids = options.pop("ids", None)
        assert not options, options
        self.hidden, self.inner, self.top_k = hidden, inner, top_k
        self.local_experts, self.num_experts = experts, experts + 3 if mapped else experts
        w13_rows = inner * (1 if self.activation.endswith("_no_mul") else 2)
        self.w13, self.w2 = (
            self._weights(extreme, experts, w13_rows, hidden),
            self._weights(extreme, experts, hidden, inner),
        )
        self.w13_scale = torch.rand((experts, w13_rows), generator=self.random) * 0.1 / hidden**0.5
        self.w13_scale[:, ::5] = 0
        self.w2_scale = torch.rand((experts, hidden), generator=self.random) * 0.02
        self.w13_bias = torch.randn((experts, w13_rows), generator=self.random) if bias else None
        self.w2_bias = torch.randn((experts, hidden), generator=self.random) if bias else None
        self.expert_map = None
        if mapped:
            self.expert_map = torch.full((self.num_experts,), -1, dtype=torch.int32)
            places = torch.randperm(self.num_experts, generator=self.random)[:experts]
            self.expert_map[places] = torch.arange(experts, dtype=torch.int32)
        self.x = torch.randn((tokens, hidden), generator=self.random) * 3 if x is None else x
        if special:
            self._make_special()
        self.x = self.x.to(self.dtype)
        self.weights = torch.rand((tokens, top_k), generator=self.random).to(self.weights_dtype)
        drawn = torch.randint(-1, self.num_experts + 1, (tokens, top_k), generator=self.random)
        self.ids = (drawn if ids is None else torch.tensor(ids)).to(self.ids_dtype)

    def _weights(self, extreme: bool, *shape: int) -> Tensor:
        low = torch.randint(-128, 128, shape, generator=self.random, dtype=torch.int8)
        return torch.where(low < 0, -128, 127).to(torch.int8) if extreme else low

    def _make_special(self) -> None:
        rows = [
            torch.zeros(self.hidden),
            torch.full((self.hidden,), -0.0),
            torch.full((self.hidden,), 1e-39),
            torch.full((self.hidden,), 1.17549435e-38),
            torch.full((self.hidden,), 6e-5),
            torch.arange(self.hidden, dtype=F32).remainder(255).sub(127) / 2,
            torch.full((self.hidden,), 60000.0),
        ]
        rows[5][0] = 127.0
        for value in (float("nan"), float("inf"), float("-inf")):
            row = torch.ones(self.hidden)
            row[self.hidden // 2] = value
            rows.append(row)
        for i, row in enumerate(rows):
            if 2 * i < len(self.x):
                self.x[2 * i] = row

    def expected(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """x, output, weights or row scales, ids or counts."""
        options = {"activation": self.activation, "swiglu_alpha": self.alpha, "swiglu_limit": self.limit}
        if self.rows is None:
            out = reference.fused_experts(
                self.x, self.w13, self.w13_scale, self.w2, self.w2_scale, self.weights, self.ids,
                w13_bias=self.w13_bias, w2_bias=self.w2_bias, expert_map=self.expert_map,
                apply_router_weight_on_input=self.on_input, **options,
            )  # fmt: skip
            return self.x, out, self.weights, self.ids
        counts = torch.bincount(
            torch.randint(0, self.local_experts, (len(self.x),), generator=self.random), minlength=self.local_experts
        )
        x, scales = self.x, None
        q, s = reference.quantize_rows(self.x.to(F32))
        if self.extreme:  # -128 too, which no quantiser of ours gives, but a caller may
            q = torch.where(q < 0, -128, 127).to(torch.int8)
        if self.rows == "int8":
            x, scales = q, s
        pieces, start = [], 0
        for e, count in enumerate(counts.tolist()):
            part = slice(start, start + count)
            start += count
            pieces.append(
                reference.expert_rows(
                    q[part],
                    s[part],
                    self.w13[e],
                    self.w13_scale[e],
                    None if self.w13_bias is None else self.w13_bias[e],
                    self.w2[e],
                    self.w2_scale[e],
                    None if self.w2_bias is None else self.w2_bias[e],
                    **options,
                )
            )
        return x, torch.cat(pieces), scales, counts.to(self.ids_dtype)

    def encode(self) -> bytes:
        """The case in the file's format."""
        x, out, weights, indices = self.expected()
        name = self.name.encode()
        head = struct.pack("<I", len(name)) + name
        head += struct.pack(
            "<12q2f", int(self.rows is not None), self.num_experts, self.local_experts, self.hidden, self.inner,
            ACTIVATIONS.index(self.activation), len(self.x), self.top_k, int(self.on_input), CODES[x.dtype],
            CODES[indices.dtype], CODES[self.weights_dtype], self.alpha, self.limit,
        )  # fmt: skip
        arrays = (
            self.w13, self.w13_scale, self.w13_bias, self.w2, self.w2_scale, self.w2_bias, self.expert_map,
            x, weights, indices, out,
        )  # fmt: skip
        return head + b"".join(map(_array, arrays))


def cases() -> Iterator[Case]:
    """Every case of the file."""
    for activation in ACTIVATIONS:
        yield Case(f"{activation}", 7, 2, 3, 70, 37, activation=activation)
        yield Case(f"{activation} bias bf16", 5, 1, 2, 64, 48, activation=activation, bias=True, dtype=BF16)
    for dtype, weights_dtype, ids_dtype in (
        (F32, F16, torch.int32), (BF16, BF16, torch.int64), (F16, F32, torch.int32),
    ):  # fmt: skip
        label = str(dtype).removeprefix("torch.")
        yield Case(f"{label} special rows", 21, 2, 3, 100, 33, dtype=dtype, weights_dtype=weights_dtype,
                   ids_dtype=ids_dtype, special=True)  # fmt: skip
        yield Case(f"{label} map", 9, 3, 4, 65, 17, dtype=dtype, weights_dtype=weights_dtype, mapped=True, bias=True)
        yield Case(f"{label} weight on input", 6, 1, 3, 96, 16, dtype=dtype, on_input=True, special=True)
        yield Case(f"{label} rows", 11, 1, 3, 50, 40, dtype=dtype, rows="float", bias=True)
    yield Case("rows int8", 13, 1, 4, 130, 20, rows="int8", ids_dtype=torch.int32)
    yield Case("rows int8, extreme", 13, 1, 4, 130, 20, rows="int8", extreme=True)
    for tokens in (*range(1, 8), 13, 15, 16, 17, 18, 31, 32, 33, 35, 36, 48, 49, 65):  # around the row tiles
        yield Case(f"one expert, {tokens} rows", tokens, 1, 1, 64, 64, ids=[[0]] * tokens, extreme=True)
        yield Case(f"one expert, {tokens} rows, padded", tokens, 1, 1, 100, 72, ids=[[0]] * tokens, bias=True)
    for name, activation, hidden, inner in (
        ("gated", "silu", 70, 40), ("not gated", "gelu_no_mul", 150, 48), ("deep", "silu", 520, 32),
    ):  # fmt: skip
        crowds = [expert for expert, rows in enumerate((3, 40, 0, 16, 1, 33, 5)) for _ in range(rows)]
        order = torch.randperm(len(crowds), generator=torch.Generator().manual_seed(len(name))).tolist()
        ids = [[crowds[i]] for i in order]
        yield Case(f"crowds, {name}", len(ids), 1, 7, hidden, inner, activation=activation, ids=ids, dtype=BF16)
    yield Case("one expert, 520 rows", 520, 1, 1, 20, 16, ids=[[0]] * 520)  # the driver cuts after 512
    yield Case("crowds, two slots", 90, 2, 3, 70, 40, mapped=True, dtype=F16, special=True)
    yield Case("crowds, rows", 99, 1, 3, 70, 40, rows="float", bias=True)
    yield Case("crowds, rows int8", 99, 1, 3, 130, 40, rows="int8")
    for hidden, inner in ((1, 1), (3, 16), (17, 15), (48, 1), (64, 31), (63, 65), (129, 127), (260, 80)):
        yield Case(f"shape {hidden} x {inner}", 4, 2, 2, hidden, inner, activation="swigluoai", swiglu=(1.0, 0.5))
        yield Case(f"shape {hidden} x {inner} no gate", 3, 1, 2, hidden, inner, activation="relu2_no_mul")
    yield Case("all slots dropped", 3, 2, 2, 40, 24, ids=[[-1, -1], [2, -5], [9, -1]])
    yield Case("an expert twice", 3, 3, 2, 40, 24, ids=[[1, 1, 0], [0, 0, 0], [-1, 1, 1]])
    yield Case("no tokens", 0, 2, 2, 40, 24)
    yield Case("cancelling sums", 2, 1, 1, 2049, 16, ids=[[0], [0]], extreme=True)
    full = Case("full range", 2, 1, 1, 64, 64, ids=[[0], [0]], x=torch.ones(2, 64))
    full.w13[:, :64], full.w13[:, 64:], full.w2[:] = 1, -128, -128
    full.w13_scale[:, :64], full.w13_scale[:, 64:], full.w2_scale[:] = 1.0, 1 / 128, 1 / 128
    yield full


def main(path: str) -> None:
    """Write the file."""
    encoded = [case.encode() for case in cases()]
    Path(path).write_bytes(struct.pack("<III", MAGIC, FORMAT, len(encoded)) + b"".join(encoded))
    print(f"{path}: {len(encoded)} cases, {Path(path).stat().st_size} bytes")


if __name__ == "__main__":
    main(sys.argv[1])
