"""The modules that take the place of a model's experts, MLPs and linears when a quantised checkpoint is loaded.

They are made empty, because transformers builds models without data first, and get their weights afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ...contracts import MoEConfig
from ...errors import WeightLayoutError
from ...layer import FusedMoE

if TYPE_CHECKING:
    from typing_extensions import Self


_ELEMENTS_AT_A_TIME = 1 << 20


def integer_dtype(dtype: torch.dtype) -> torch.dtype:
    """Float dtype of the integers that :class:`QuantizedLinear` multiplies, for a model of ``dtype``.

    bfloat16 holds integers up to 256, and is taken where the machine multiplies it with sums in fp32; torch's own
    loops round the sums on the way. In float16 the sums would overflow.
    """
    native = dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if native else torch.float32


class QuantizedExperts(nn.Module):
    """The routed experts of one layer, called as transformers calls its own.

    Attributes:
        key: name of the experts in the checkpoint.
        index: number of the layer.
        fused: the packed layer.
    """

    fused: FusedMoE | None

    def __init__(self, key: str, index: int, config: MoEConfig) -> None:
        super().__init__()
        self.key, self.index = key, index
        self.num_experts = config.num_experts
        self.fused = None

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """``[M, H]``, ``[M, k]`` ids, ``[M, k]`` weights -> ``[M, H]``; ids from num_experts on contribute nothing."""
        out: Tensor = _loaded(self.fused, self.key)(hidden_states, top_k_weights, top_k_index)
        return out


class QuantizedMLP(nn.Module):
    """A gated MLP without biases (a shared expert, a dense layer): experts with one expert that every token visits."""

    fused: FusedMoE | None

    def __init__(self, key: str, config: MoEConfig) -> None:
        super().__init__()
        self.key, self.config = key, config
        self.fused = None

    def forward(self, x: Tensor) -> Tensor:
        """``[..., H]`` -> ``[..., H]``."""
        shape = (*x.shape[:-1], 1)
        ids = torch.zeros(shape, dtype=torch.int32, device=x.device)
        weights = torch.ones(shape, dtype=torch.float32, device=x.device)
        out: Tensor = _loaded(self.fused, self.key)(x, weights, ids)
        return out


class QuantizedLinear(nn.Module):
    """A W8A8 linear: each row of the input is quantised by itself, then integers are multiplied.

    The integers lie in a float dtype that holds them exactly, so that torch's own matrix product serves on every
    machine. In float32 the sums of products are exact, too: where the sums of a wide weight could pass 2**24, its
    columns are multiplied in pieces that cannot, and those are added in float64. In bfloat16 each sum is rounded
    once, as that of a bfloat16 linear is. Integers and scales keep their dtypes through ``.to`` and ``.half``; the
    bias, and what comes in, have those of the model.

    Attributes:
        weight: ``[N, K]``, whole numbers from -128 to 127.
        weight_scale: fp32 ``[N]``.
        bias: ``[N]`` or None.
    """

    weight: Tensor
    weight_scale: Tensor
    bias: nn.Parameter | None

    def __init__(self, key: str, linear: nn.Linear) -> None:
        super().__init__()
        self.key = key
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_buffer("weight", None)
        self.register_buffer("weight_scale", None)
        self.register_parameter("bias", linear.bias)
        self._pieces: tuple[int, ...] = ()

    def extra_repr(self) -> str:
        """Sizes, as torch shows those of a linear."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def fill(self, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype) -> None:
        """Take int8 ``[N, K]`` and fp32 ``[N]``; ``dtype`` is the model's."""
        self.weight = weight.to(integer_dtype(dtype))
        self.weight_scale = weight_scale
        self._pieces = exact_pieces(self.weight)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        for name, shape in (("weight", (self.out_features, self.in_features)), ("weight_scale", (self.out_features,))):
            stored = state_dict.get(prefix + name)
            if getattr(self, name) is None and stored is not None:  # made empty, and not filled yet
                setattr(self, name, torch.empty(shape, dtype=stored.dtype, device=stored.device))
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        if self.weight is not None:
            self._pieces = exact_pieces(self.weight)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def keep_dtype(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if moved.dtype == tensor.dtype or not (tensor is self.weight or tensor is self.weight_scale):
                return moved
            return tensor.to(moved.device)  # in float16 the sums would overflow, in bfloat16 scales would be rounded

        return cast("Self", super()._apply(keep_dtype, recurse))  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor) -> Tensor:
        """``[..., K]`` -> ``[..., N]``, in the dtype of x."""
        quantized, scale = quantize_activations(x)
        rows = quantized.to(self.weight.dtype)
        if len(self._pieces) == 1:
            sums = nn.functional.linear(rows, self.weight)
        else:
            parts = zip(rows.split(self._pieces, dim=-1), self.weight.split(self._pieces, dim=1), strict=True)
            sums = torch.stack([nn.functional.linear(*part).to(torch.float64) for part in parts]).sum(dim=0)
        out = sums.to(torch.float32) * scale * self.weight_scale
        if self.bias is not None:
            out = out + self.bias.to(torch.float32)
        return out.to(x.dtype)


def dequantized_linear(empty: QuantizedLinear, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype) -> nn.Linear:
    """The float linear of int8 ``[N, K]`` and fp32 ``[N]``, rounded once to ``dtype``; with the bias of ``empty``."""
    linear = nn.Linear(empty.in_features, empty.out_features, bias=False, device="meta")
    product = weight.to(torch.float32).mul_(weight_scale[:, None])
    linear.weight = nn.Parameter(product.to(dtype), requires_grad=False)
    linear.register_parameter("bias", empty.bias)
    return linear


def exact_pieces(weight: Tensor) -> tuple[int, ...]:
    """Widths of pieces of the columns of whole numbers ``[N, K]`` that fp32 multiplies with a row of Q exactly.

    Every partial sum of such a piece is a whole number below 2**24, in whatever order it is added up. A weight in
    another dtype is one piece: its sums are rounded.
    """
    width = weight.shape[1]
    if weight.dtype != torch.float32 or weight.device.type == "meta":
        return (width,)
    pieces: list[int] = []
    begin = 0
    while begin < width:
        rows = weight[:, begin:].split(max(1, _ELEMENTS_AT_A_TIME // (width - begin)))
        # As far as the sum of 127 |w| stays below the bound, in every row.
        reach = (int((127.0 * part.abs().to(torch.float64).cumsum(dim=1) < 2**24).sum(dim=1).min()) for part in rows)
        pieces.append(max(1, min(reach, default=1)))
        begin += pieces[-1]
    return tuple(pieces) or (width,)


def quantize_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """Q of docs/numerics.md for rows ``[..., K]``: whole numbers in fp32, and fp32 scales ``[..., 1]``.

    The same as :func:`int8moe.reference.quantize_rows`, in operations that torch.compile can fuse.
    """
    rows = x.to(torch.float32)
    amax = rows.abs().amax(dim=-1, keepdim=True)
    inverse = torch.full_like(amax, 127.0) / amax
    live = torch.isfinite(amax) & torch.isfinite(inverse)
    scaled = torch.where(live, rows * inverse, 0.0)
    scale = torch.where(live, amax / torch.full_like(amax, 127.0), 0.0)
    scale = torch.where(torch.isfinite(amax), scale, torch.nan)
    return scaled.round().clamp(-127.0, 127.0), scale


def _loaded(fused: FusedMoE | None, key: str) -> FusedMoE:
    if fused is None:
        raise WeightLayoutError(f"{key}: the weights are not loaded; load the model with from_pretrained")
    return fused
