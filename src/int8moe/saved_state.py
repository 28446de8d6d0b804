"""Reads a state_dict back into a layer: the tag is checked before a byte is copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .contracts import MoEConfig, WeightLayout
from .errors import WeightLayoutError
from .parameters import EMPTY, LOADED, PACKED, PARAMETERS, WEIGHTS

if TYPE_CHECKING:
    from .weights import ExpertWeights


Fill = Callable[[str, Tensor, Tensor], "Tensor | None"]
"""Called with a key, a tensor of the layer and the state's tensor, of the same shape and dtype: writes the values into
the former, or returns a tensor that holds them and takes its place."""


def _copy(key: str, target: Tensor, tensor: Tensor) -> None:
    target.copy_(tensor)


def load_state(
    layer: ExpertWeights,
    state_dict: dict[str, Any],
    prefix: str,
    missing_keys: list[str],
    *,
    fill: Fill = _copy,
) -> None:
    """Copy the tensors below ``prefix`` into ``layer``; missing ones are added to ``missing_keys``.

    With another ``fill`` the tensors of the state may be on the meta device: only their shapes and dtypes count.
    When it raises, the layer is left empty.

    Raises:
        WeightLayoutError: packed for another kernel, of other sizes, or taken of storage that has changed since.
    """
    extra = state_dict.get(f"{prefix}_extra_state")
    found = {name: state_dict.get(prefix + name) for name in PARAMETERS}
    if extra is None or extra["state"] == EMPTY:
        missing_keys.extend(prefix + n for n in PARAMETERS if found[n] is None and n in needed_parameters(layer.config))
        if extra is None:
            missing_keys.append(f"{prefix}_extra_state")
        else:
            layer.clear()
        return
    ended_by = getattr(extra.get("generation"), "ended_by", None)
    if ended_by is not None:
        raise WeightLayoutError(
            f"{layer.layer_name}: the weights of this state were {ended_by} after state_dict() was called, and it "
            "shares their storage; call state_dict() again, or clone its tensors"
        )
    layout = WeightLayout(**extra["layout"]) if extra["layout"] is not None else None
    if layout is not None:
        layer._accept_layout(layout)
    absent = [name for name in needed_parameters(layer.config) if found[name] is None]
    if absent:
        missing_keys.extend(prefix + name for name in absent)
        return
    layer.clear()
    try:
        with torch.inference_mode(False), torch.no_grad():
            _load_tensors(layer, found, extra, layout, prefix, fill)
            for key in state_dict:
                if key.startswith(f"{prefix}aux."):
                    tensor = state_dict[key].detach()
                    room = torch.empty_like(tensor, device=layer._home)
                    held = fill(key, room, tensor)
                    layer.aux[key.removeprefix(f"{prefix}aux.")] = room if held is None else held
    except BaseException:
        layer.clear()  # no mixture of old and new weights
        raise
    layer._loaded = set(range(layer.config.local_experts))
    layer.layout = layout
    if layout is not None:
        layer._publish()
    layer.state = LOADED if layout is None else PACKED


def _load_tensors(
    layer: ExpertWeights,
    found: dict[str, Tensor | None],
    extra: dict[str, Any],
    layout: WeightLayout | None,
    prefix: str,
    fill: Fill,
) -> None:
    packed = layout is not None and not layout.is_canonical
    if packed:
        strides = extra["expert_stride"]
        layer.allocate((strides["w13_weight"], strides["w2_weight"]))
    else:
        layer._make_room()
    for name, tensor in found.items():
        if tensor is None:
            continue
        target: Tensor | None = getattr(layer, name)
        if packed and name in WEIGHTS:
            if tensor.dtype == torch.uint8 and tensor.shape == layer.expert_bytes(name).shape:
                setattr(layer, name, layer.expert_bytes(name))
            else:  # a kernel that keeps its packed weights in tensors of its own
                setattr(layer, name, torch.empty_like(tensor, device=layer._home))
            target = getattr(layer, name)
        if target is None or target.shape != tensor.shape or target.dtype != tensor.dtype:
            wanted = "none" if target is None else f"{target.dtype} {tuple(target.shape)}"
            raise WeightLayoutError(
                f"{prefix + name}: the state has {tensor.dtype} {tuple(tensor.shape)}, this layer wants {wanted}"
            )
        held = fill(prefix + name, target, tensor)
        if held is not None:
            setattr(layer, name, held)


def needed_parameters(config: MoEConfig) -> tuple[str, ...]:
    """Names of the tensors that a loaded layer of this config has."""
    return tuple(name for name in PARAMETERS if config.has_bias or not name.endswith("bias"))
