"""Where a layer's tensors live: aligned storage on huge pages, and the kernel's own named tensors."""

from __future__ import annotations

import ctypes
import logging
import math
import sys
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

logger = logging.getLogger("int8moe.storage")

_HUGE_PAGE = 2 << 20
_MADV_HUGEPAGE = 14


class Generation:
    """Shared by a layer and the state_dicts that were taken of one form of its storage.

    ``ended_by`` says what has changed the bytes since. A saved or copied state has storage of its own, and so an
    empty mapping instead.
    """

    def __init__(self) -> None:
        self.ended_by: str | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Generation:
        copied = Generation()
        copied.ended_by = self.ended_by
        return copied

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return OrderedDict, ()


class AuxTensors(nn.Module):
    """Named tensors of a kernel beside the weights (compensation sums, say); they travel in the state_dict."""

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._buffers[name]
        if tensor is None:
            raise KeyError(name)
        return tensor

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        self.register_buffer(name, tensor)

    def __contains__(self, name: object) -> bool:
        return name in self._buffers

    def __iter__(self) -> Iterator[str]:
        return iter(self._buffers)

    def __len__(self) -> int:
        return len(self._buffers)

    def clear(self) -> None:
        """Forget all of them."""
        self._buffers.clear()


def numbered(device: str | torch.device) -> torch.device:
    """The device with its number. Tensors of "cuda" say "cuda:0", which is not equal to it.

    Without a number it would also mean another device whenever the current one changes.
    """
    device = torch.device(device)
    if device.index is not None or device.type in ("cpu", "meta"):
        return device
    return torch.empty(0, device=device).device


def allocate_bytes(count: int, device: torch.device) -> Tensor:
    """Uninitialised bytes, 64-byte aligned; large ones ask for huge pages."""
    storage = torch.empty(count, dtype=torch.uint8, device=device)
    if device.type == "cpu" and count >= 2 * _HUGE_PAGE:
        _ask_for_huge_pages(storage)
    return storage


def _ask_for_huge_pages(storage: Tensor) -> None:
    """Ordinary 4 KB pages cost 17 to 30 % of the read bandwidth; the kernel is asked before the first touch."""
    if sys.platform != "linux":
        return
    start = math.ceil(storage.data_ptr() / _HUGE_PAGE) * _HUGE_PAGE
    length = (storage.data_ptr() + storage.numel() - start) // _HUGE_PAGE * _HUGE_PAGE
    libc = ctypes.CDLL(None, use_errno=True)
    if length > 0 and libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_HUGEPAGE) != 0:
        logger.debug("madvise(MADV_HUGEPAGE) was refused: errno %d", ctypes.get_errno())
