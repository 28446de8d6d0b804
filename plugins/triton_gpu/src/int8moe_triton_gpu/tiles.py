"""How a GEMM is cut up: the tile of one program, by rows per expert. Imports neither torch nor triton.

A tile changes the time of a call and never its bits. Two sources, in this order:

1. a file that ``int8moe tune`` wrote for this device and layer (see :mod:`.tuned`);
2. ``tiles.json`` of this package: per family of devices, guarded by the budgets that the ahead-of-time check holds.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from int8moe.errors import ConfigError

SCHEMA = 1

ALIGNMENT = 16
"""Bytes of one load; a row of int8 that begins on it is read by so many."""

_Edge = Annotated[int, Field(ge=16, le=512)]


class Tile(BaseModel):
    """One program's share of a GEMM, and how it is compiled.

    Attributes:
        block_m: rows; 16 is the least that an int8 tensor instruction takes.
        block_n: columns.
        block_k: depth of one step; int8 instructions take 32.
        group_m: blocks of rows that walk the columns together.
        num_warps: of 32 lanes (64 on AMD).
        num_stages: depth of the software pipeline.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    block_m: _Edge
    block_n: _Edge
    block_k: Annotated[int, Field(ge=32, le=512)]
    group_m: Annotated[int, Field(ge=1, le=64)] = 8
    num_warps: Annotated[int, Field(ge=1, le=16)] = 4
    num_stages: Annotated[int, Field(ge=1, le=8)] = 3

    def model_post_init(self, context: object) -> None:
        """Refuse what Triton cannot cut: every edge is a power of two."""
        for name in ("block_m", "block_n", "block_k", "num_warps"):
            value: int = getattr(self, name)
            if value & (value - 1):
                raise ValueError(f"{name} = {value} is not a power of two")


class Step(BaseModel):
    """The tiles of both GEMMs for up to so many rows per expert.

    Attributes:
        rows_per_expert: (token, slot) pairs of a call over the experts of the layer, at most; None = any number.
        gate_up: tile of GEMM1 (w13).
        down: tile of GEMM2 (w2). Both have the same block_m, because both walk the same blocks of rows.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rows_per_expert: Annotated[int, Field(ge=1)] | None
    gate_up: Tile
    down: Tile

    def model_post_init(self, context: object) -> None:
        """Refuse two heights."""
        if self.gate_up.block_m != self.down.block_m:
            raise ValueError(f"gate_up.block_m {self.gate_up.block_m} differs from down.block_m {self.down.block_m}")


class Steps(BaseModel):
    """Everything of one device and layer.

    Attributes:
        one_row_slots: up to so many (token, slot) pairs each is a block of its own: nothing is sorted, and weights
            are read once a slot.
        one_row: the tiles for that; its rows_per_expert is not read.
        sorted: for more, by ascending rows_per_expert; the last takes any number.
        elements: how many a program of the elementwise kernels takes at a time, a power of two.
        unaligned_edge: block_n and block_k at most, for a depth that is no multiple of 16: each int8 is loaded by
            itself then, and a larger tile would not fit into registers. None = as it is.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    one_row_slots: Annotated[int, Field(ge=0)]
    one_row: Step
    sorted: tuple[Step, ...]
    elements: Annotated[int, Field(ge=256, le=2**20)]
    unaligned_edge: _Edge | None

    def model_post_init(self, context: object) -> None:
        """Refuse steps that leave a number of rows without a tile."""
        if self.elements & (self.elements - 1):
            raise ValueError(f"elements = {self.elements} is not a power of two")
        limits = [step.rows_per_expert for step in self.sorted]
        known = [limit for limit in limits if limit is not None]
        if not limits or limits[-1] is not None or len(known) != len(limits) - 1 or known != sorted(set(known)):
            raise ValueError(f"rows_per_expert has to ascend and end with null, found {limits}")

    def step(self, slots: int, experts: int) -> Choice:
        """The step for a call of so many (token, slot) pairs on so many experts: from shapes alone."""
        if slots <= self.one_row_slots:
            return Choice(self.one_row, one_row=True)
        rows = slots / max(experts, 1)
        step = next(s for s in self.sorted if s.rows_per_expert is None or rows <= s.rows_per_expert)
        return Choice(step, one_row=False)

    def fitted(self, tile: Tile, depth: int) -> Tile:
        """The tile for a GEMM of that depth."""
        edge = self.unaligned_edge
        if edge is None or depth % ALIGNMENT == 0:
            return tile
        return tile.model_copy(update={"block_n": min(tile.block_n, edge), "block_k": min(tile.block_k, edge)})


class Choice(NamedTuple):
    """A step, and whether each slot is a block of its own."""

    step: Step
    one_row: bool


@cache
def default_steps(family: str) -> Steps:
    """The steps of ``tiles.json`` for a family of devices: "sm_80", "sm_90", "gfx942" or "interpreter"."""
    table = json.loads(resources.files(__package__).joinpath("tiles.json").read_text(encoding="utf-8"))
    if family not in table:
        raise ConfigError(f"tiles.json has no family of devices {family!r}; it has {', '.join(table)}")
    return Steps.model_validate(table[family])
