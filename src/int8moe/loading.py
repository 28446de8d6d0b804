"""Checks tensors that are handed to a layer, before a single byte of it is written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .errors import ConfigError, WeightLayoutError

if TYPE_CHECKING:
    from .contracts import MoEConfig
    from .weights import ExpertWeights

ParameterValue = Tensor | float | tuple[Any, Any]
"""A tensor, a number (one scale for all), or a pair (gate, up) of them for the w13 parameters."""

Validated = list[tuple[str, slice, Tensor]]
"""Parameter name, rows of it, and the source for these rows ``[E, rows, ...]``."""

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def validate(
    layer: ExpertWeights, values: dict[str, ParameterValue | None], gate_up_layout: str, expert: int | None
) -> Validated:
    """Normalise the parameters of all experts, or of the one with local index ``expert``.

    Raises:
        WeightLayoutError: a parameter is missing, unknown, of a wrong shape or dtype, or holds a scale that is
            NaN, infinite or negative; the text names parameter and experts.
    """
    config = layer.config
    owner = layer.layer_name if expert is None else f"{layer.layer_name}, expert {expert}"
    if gate_up_layout not in ("stacked", "interleaved"):
        raise WeightLayoutError(f'{owner}: gate_up_layout={gate_up_layout!r}: give "stacked" or "interleaved"')
    names = {"w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale"}
    biases = {"w13_bias", "w2_bias"}
    given = {name: value for name, value in values.items() if value is not None}
    if unknown := sorted(set(given) - names - biases):
        raise WeightLayoutError(f"{owner}: unknown parameters {', '.join(unknown)}")
    if not config.has_bias and (extra := sorted(set(given) & biases)):
        raise WeightLayoutError(f"{owner}: {', '.join(extra)} given, but the config has has_bias=False")
    if missing := sorted((names | (biases if config.has_bias else set())) - set(given)):
        raise WeightLayoutError(f"{owner}: {', '.join(missing)} missing")
    count = config.local_experts if expert is None else 1
    first = 0 if expert is None else expert
    checker = _Checker(owner, count, first, config.intermediate_size if config.is_gated else None, gate_up_layout)
    validated: Validated = []
    for name, value in given.items():
        rows = config.w13_rows if name.startswith("w13") else config.hidden_size
        columns = config.hidden_size if name.startswith("w13") else config.intermediate_size
        for part, piece in checker.parts(name, value, rows, one_expert=expert is not None):
            height = part.stop - part.start
            if name.endswith("weight"):
                source = checker.weight(name, piece, height, columns, part)
            elif name.endswith("scale"):
                source = checker.scale(name, piece, height, rows)
            else:
                source = checker.bias(name, piece, height)
            validated += checker.stacked(name, part, source)
    return validated


class _Checker:
    """The checks of one load, with what their messages have in common."""

    def __init__(self, owner: str, count: int, first: int, half: int | None, gate_up_layout: str) -> None:
        self.owner = owner
        self.count = count  # experts in the tensors
        self.first = first  # local index of the first of them
        self.half = half  # I with a gate, None without
        self.interleaved = gate_up_layout == "interleaved"

    def fail(self, name: str, what: str) -> WeightLayoutError:
        return WeightLayoutError(f"{self.owner}: {name} {what}")

    def parts(self, name: str, value: ParameterValue, rows: int, *, one_expert: bool) -> list[tuple[slice, Tensor]]:
        """Split a (gate, up) pair; give a single expert's tensors their leading dimension."""
        whole = slice(0, rows)
        if isinstance(value, tuple):
            if self.half is None or not name.startswith("w13") or len(value) != 2:
                raise self.fail(name, "is a tuple: only w13 of a gated activation takes a pair (gate, up)")
            pieces = [(slice(0, self.half), value[0]), (slice(self.half, rows), value[1])]
        else:
            pieces = [(whole, value)]
        out = []
        for part, piece in pieces:
            if isinstance(piece, (int, float)) and not isinstance(piece, bool):
                piece = torch.tensor(float(piece), dtype=torch.float32, device="cpu")
            if not isinstance(piece, Tensor):
                raise self.fail(name, f"is {type(piece).__name__}; a tensor is wanted (or a number, for a scale)")
            if piece.device.type == "meta" or piece.layout != torch.strided:
                raise self.fail(
                    name, f"is a {piece.layout} tensor on {piece.device}; a strided one with data is wanted"
                )
            tensor = piece
            out.append((part, tensor.detach().unsqueeze(0) if one_expert else tensor.detach()))
        return out

    def weight(self, name: str, tensor: Tensor, rows: int, columns: int, part: slice) -> Tensor:
        if tensor.dtype != torch.int8:
            raise self.fail(name, f"is {tensor.dtype}; int8 is wanted (int8moe.quantize_experts makes it from floats)")
        if tuple(tensor.shape) != (self.count, rows, columns):
            raise self.fail(name, f"has shape {self._shape(tensor)}, wanted is {[self.count, rows, columns]}")
        return tensor

    def scale(self, name: str, tensor: Tensor, rows: int, all_rows: int) -> Tensor:
        if tensor.dtype not in _FLOATS:
            raise self.fail(name, f"is {tensor.dtype}; float32, bfloat16 or float16 is wanted")
        values = tensor.to(torch.float32)
        if values.dim() == 3 and values.shape[2] == 1:
            values = values.squeeze(2)
        shape = tuple(values.shape)
        if shape == (self.count, rows):
            pass
        elif shape in ((), (self.count,), (self.count, 1)):
            values = values.reshape(-1, 1).expand(self.count, rows)
        elif shape == (self.count, 2) and self.half is not None and name.startswith("w13") and rows == all_rows:
            # One scale for the gate and one for the up projection; their rows lie as the weight's do.
            values = values.repeat(1, self.half) if self.interleaved else values.repeat_interleave(self.half, dim=1)
        else:
            raise self.fail(
                name,
                f"has shape {self._shape(tensor)}; one scale a row ({[self.count, rows]}, a trailing 1 is "
                "accepted) or one a tensor is wanted (group and block scales are not supported)",
            )
        bad = ~torch.isfinite(values) | (values < 0)
        if bool(bad.any()):
            experts = (bad.any(dim=1).nonzero().flatten() + self.first).tolist()
            example = values[bad][0].item()
            raise self.fail(
                name,
                f"of experts {', '.join(map(str, experts[:16]))}{' ...' if len(experts) > 16 else ''} holds {example}; "
                "scales are finite and not negative",
            )
        return values

    def bias(self, name: str, tensor: Tensor, rows: int) -> Tensor:
        if tensor.dtype not in _FLOATS:
            raise self.fail(name, f"is {tensor.dtype}; float32, bfloat16 or float16 is wanted")
        if tuple(tensor.shape) != (self.count, rows):
            raise self.fail(name, f"has shape {self._shape(tensor)}, wanted is {[self.count, rows]}")
        return tensor

    def stacked(self, name: str, part: slice, source: Tensor) -> Validated:
        """De-interleave rows g0, u0, g1, u1, ... of a whole w13; a pair is stacked already."""
        whole = self.half is not None and part == slice(0, 2 * self.half)
        if not (self.interleaved and whole and name.startswith("w13")):
            return [(name, part, source)]
        assert self.half is not None
        return [
            (name, slice(0, self.half), source[:, 0::2]),
            (name, slice(self.half, 2 * self.half), source[:, 1::2]),
        ]

    def _shape(self, tensor: Tensor) -> list[int]:
        return list(tensor.shape)


def with_expert_map(config: MoEConfig, expert_map: Tensor | Sequence[int]) -> tuple[MoEConfig, Tensor]:
    """Check an expert_map, and write what it implies into the config."""
    given = torch.as_tensor(expert_map).detach()
    if given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
        raise ConfigError(f"expert_map is {given.dtype}; give integers, a local id or -1 for each expert")
    wide = given.to("cpu", torch.int64)
    table = wide.clamp(-2, 2**31 - 1).to(torch.int32)
    if tuple(table.shape) != (config.num_experts,):
        raise ConfigError(f"expert_map has shape {list(table.shape)}; give one local id or -1 for each of the "
                          f"{config.num_experts} experts")  # fmt: skip
    held = sorted(local for local in table.tolist() if local >= 0)
    count = config.num_local_experts if config.num_local_experts is not None else len(held)
    if held != list(range(count)) or min(table.tolist(), default=-1) < -1:
        raise ConfigError(
            f"expert_map places {held}: its local ids have to be 0 to {count - 1}, each once, and -1 elsewhere"
        )
    return config.model_copy(update={"has_expert_map": True, "num_local_experts": count}), table
