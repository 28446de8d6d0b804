"""Checks what is handed to a layer's forward, and who is watching the call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .errors import UnsupportedInputError

if TYPE_CHECKING:
    from .layer import FusedMoE

ID_DTYPES = (torch.int32, torch.int64)
WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def bad(layer: FusedMoE, name: str, tensor: Tensor, wanted: str) -> UnsupportedInputError:
    """The error for a tensor that does not fit."""
    return UnsupportedInputError(
        f"{layer.layer_name}: {name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}; wanted is {wanted}"
    )


def check_dtype(layer: FusedMoE, name: str, tensor: Tensor) -> None:
    """Refuse a dtype that the layer does not take."""
    if tensor.dtype not in layer._dtypes:
        raise bad(layer, name, tensor, " or ".join(sorted(str(d).removeprefix("torch.") for d in layer._dtypes)))


def _check_strided(layer: FusedMoE, name: str, given: Tensor) -> None:
    """Refuse what is no tensor, and one whose elements have no strides."""
    if not isinstance(given, Tensor):
        raise UnsupportedInputError(f"{layer.layer_name}: {name} is {type(given).__name__}; give a tensor")
    if given.layout != torch.strided:
        raise bad(layer, name, given, f"a strided tensor, not {given.layout}")


def check_inputs(layer: FusedMoE, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> None:
    """Refuse inputs of forward that do not fit, by name; flattened ids and weights are accepted."""
    config = layer.config
    for name, given in (("hidden_states", hidden_states), ("topk_weights", topk_weights), ("topk_ids", topk_ids)):
        _check_strided(layer, name, given)
    if hidden_states.dim() < 1 or hidden_states.shape[-1] != config.hidden_size:
        raise bad(layer, "hidden_states", hidden_states, f"[..., {config.hidden_size}]")
    check_dtype(layer, "hidden_states", hidden_states)
    wanted = (*hidden_states.shape[:-1], config.top_k)
    flat = (hidden_states.numel() // config.hidden_size, config.top_k)
    for name, tensor, dtypes in (
        ("topk_weights", topk_weights, WEIGHT_DTYPES),
        ("topk_ids", topk_ids, ID_DTYPES),
    ):
        if tensor.shape != wanted and tensor.shape != flat:
            raise bad(layer, name, tensor, f"{list(wanted)}")
        if tensor.dtype not in dtypes:
            raise bad(layer, name, tensor, " or ".join(str(d).removeprefix("torch.") for d in dtypes))
        if tensor.device != hidden_states.device:
            raise bad(layer, name, tensor, f"on {hidden_states.device}, as hidden_states")
    if hidden_states.device != layer.w13_weight_scale.device:
        raise bad(layer, "hidden_states", hidden_states, f"on {layer.w13_weight_scale.device}, as the weights")


def check_rows(layer: FusedMoE, rows: Tensor, row_scales: Tensor | None) -> None:
    """Refuse rows and row_scales of forward_sorted that do not fit, by name: a kernel trusts pointers."""
    home = layer.w13_weight_scale.device
    hidden_size = layer.config.hidden_size
    scales = {} if row_scales is None else {"row_scales": row_scales}
    for name, given in {"rows": rows, **scales}.items():
        _check_strided(layer, name, given)
        if given.device != home:
            raise bad(layer, name, given, f"on {home}, as the weights")
    if rows.dim() != 2 or rows.shape[1] != hidden_size:
        raise bad(layer, "rows", rows, f"[T, {hidden_size}]")
    if row_scales is None:
        check_dtype(layer, "rows", rows)
    elif rows.dtype != torch.int8 or row_scales.dtype != torch.float32 or row_scales.shape != rows.shape[:1]:
        raise UnsupportedInputError(
            f"{layer.layer_name}: rows {rows.dtype} with row_scales {row_scales.dtype} {list(row_scales.shape)}; "
            f"give int8 rows with float32 [{rows.shape[0]}]"
        )


def checked_out(layer: FusedMoE, out: Tensor, shape: torch.Size, like: Tensor) -> Tensor:
    """The caller's out, if it fits."""
    if out.shape != shape or out.dtype != like.dtype or out.device != like.device:
        raise bad(layer, "out", out, f"{like.dtype} {list(shape)} on {like.device}")
    return out


def same_storage(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors may overlap."""
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def must_use_operator(hidden_states: Tensor, topk_weights: Tensor) -> bool:
    """Whether somebody is watching (a tracer, a dispatch mode, autograd), who has to see the operator."""
    return (
        torch.compiler.is_compiling()
        or type(hidden_states) not in (Tensor, torch.nn.Parameter)
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or (torch.is_grad_enabled() and (hidden_states.requires_grad or topk_weights.requires_grad))
    )
