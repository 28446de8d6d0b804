"""torch's int8 linears in a loop over experts, activations quantised per row as in int8moe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from expert_loop import ExpertLoop
from peer import Peer

if TYPE_CHECKING:
    from torch import Tensor

    from layer_data import Weights

PEERS = (
    Peer("torch-qlinear", "oneDNN's prepacked int8 linear per expert", "torch", "OneDnnLinear", own_python=True),
    Peer("torch-int-mm", "torch._int_mm per expert, weights not packed", "torch", "IntMm", own_python=True),
)


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """[n, K] to int8 and one float32 scale a row [n, 1], symmetric."""
    rows = rows.float()
    scale = rows.abs().amax(1, keepdim=True).clamp_(min=1e-9).div_(127)
    return (rows / scale).round_().char(), scale


class Int8Loop(ExpertLoop):
    """Both projections of an expert in int8; a subclass says how a linear is called."""

    def activations(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        return quantize_rows(hidden_states)

    def linear(self, rows: Tensor, weight: Any, scale: Tensor) -> Tensor:
        """[n, K] int8 rows times one expert's weight, times its scales [N]; [n, N] float32."""
        raise NotImplementedError

    def expert(self, packed: Any, expert: int, rows: tuple[Tensor, ...]) -> Tensor:
        import torch.nn.functional as F

        w13, w13_scale, w2, w2_scale = packed
        gate, up = self.linear(rows[0], w13[expert], w13_scale[expert]).mul_(rows[1]).chunk(2, -1)
        inner, inner_scale = quantize_rows(F.silu(gate) * up)
        return self.linear(inner, w2[expert], w2_scale[expert]).mul_(inner_scale)


class IntMm(Int8Loop):
    """``torch._int_mm`` gives the int32 sums; the scales are applied in torch."""

    def pack(self, weights: Weights) -> Any:
        return tuple(weights)

    def linear(self, rows: Tensor, weight: Any, scale: Tensor) -> Tensor:
        import torch

        return torch._int_mm(rows, weight.t()).float().mul_(scale)


class OneDnnLinear(Int8Loop):
    """The operator behind torch's quantised linear modules.

    Without VNNI its 16-bit sums of products saturate: --check shows an error that no 8-bit quantisation has.
    """

    def pack(self, weights: Weights) -> Any:
        import torch

        prepack = torch.ops.onednn.qlinear_prepack
        w13, w2 = ([prepack(matrix, None) for matrix in weight] for weight in (weights.w13, weights.w2))
        return w13, weights.w13_scale, w2, weights.w2_scale

    def linear(self, rows: Tensor, weight: Any, scale: Tensor) -> Tensor:
        import torch

        zero_points = torch.zeros(scale.shape, dtype=torch.int64)
        out: Tensor = torch.ops.onednn.qlinear_pointwise(
            rows, 1.0, 0, weight, scale, zero_points, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return out
