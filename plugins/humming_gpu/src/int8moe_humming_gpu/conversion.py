"""Canonical int8 weights to the layout of humming-kernels: per-channel weights, per-token activations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# As compressed-tensors writes W8A8 checkpoints, which the package reads.
WEIGHT_SCHEMA: dict[str, Any] = {
    "format": "int-quantized",
    "type": "int",
    "num_bits": 8,
    "strategy": "channel",
    "symmetric": True,
}
INPUT_SCHEMA: dict[str, Any] = {
    "format": "int-quantized",
    "type": "int",
    "num_bits": 8,
    "dynamic": True,
    "symmetric": True,
}


def convert(weight: Tensor, weight_scale: Tensor, dtype: torch.dtype, columns: int, depth: int) -> dict[str, Tensor]:
    """Convert one weight.

    Args:
        weight: int8 ``[E, columns, depth]``, contiguous, on the device; it is left as it is.
        weight_scale: fp32 ``[E, columns]``.
        dtype: bf16 or fp16, in which the package keeps the scales.
        columns: N.
        depth: K.

    Returns:
        "weight" (int32) and "weight_scale", as ``humming.forward.humming_forward`` takes them.
    """
    from humming.schema.compressed_tensors import CompressedTensorsWeightSchema
    from humming.transform import transform_humming_tensors

    experts = weight.shape[0]
    _, tensors = CompressedTensorsWeightSchema(**WEIGHT_SCHEMA).convert_humming(
        tensors={"weight": weight, "weight_scale": weight_scale.unsqueeze(2)},
        shape_n_stacks=[columns],
        shape_k_stacks=[depth],
        param_dtype=dtype,
        num_experts=experts,
        device=weight.device,
        convert_symmetric_integer=False,
    )
    config = layer_config(experts, columns, depth, dtype, weight.device)
    converted: dict[str, Tensor] = transform_humming_tensors(config, tensors)
    return converted


def layer_config(experts: int, columns: int, depth: int, dtype: torch.dtype, device: torch.device) -> Any:
    """The package's description of one GEMM: what its forward and its conversion go by."""
    from humming.schema.compressed_tensors import CompressedTensorsInputSchema, CompressedTensorsWeightSchema
    from humming.transform import prepare_layer_config

    return prepare_layer_config(
        shape_n=columns,
        shape_k=depth,
        weight_schema=CompressedTensorsWeightSchema(**WEIGHT_SCHEMA).to_humming_schema(dtype),
        input_schema=CompressedTensorsInputSchema(**INPUT_SCHEMA).to_humming_schema(dtype),
        num_experts=experts,
        torch_dtype=dtype,
        device=device,
    )
