"""The hook implementations of every tier: they share packing and calls, and differ in one number.

A forward makes no torch computation: tensors are handed to the library as pointers and strides, and torch's threads
by its C symbol. So it runs in the child of a fork (serially), where torch's own pool would wait for ever.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from int8moe.contracts import ACTIVATIONS, WeightLayout
from int8moe.hookspecs import hookimpl
from int8moe.host import forked_with_threads, thread_limit

from . import library as native

if TYPE_CHECKING:
    from int8moe.contracts import MoEConfig
    from int8moe.weights import ExpertWeights

logger = logging.getLogger("int8moe.aarch64_neon")

_DTYPE_CODES = {
    torch.float32: native.F32,
    torch.bfloat16: native.BF16,
    torch.float16: native.F16,
    torch.int8: native.I8,
    torch.int32: native.I32,
    torch.int64: native.I64,
}
_CALL_PACK, _CALL_SIZE = native.CALL.pack, native.CALL.size


def _torch_threads() -> tuple[int | None, int | None]:
    """Addresses of torch's parallel_for and thread count; (None, None) where this torch has none."""
    folder = Path(torch.__file__).parent / "lib"
    for name in (None, str(folder / "libtorch_cpu.so")):
        try:
            symbols = ctypes.CDLL(name)
            return tuple(  # type: ignore[return-value]
                ctypes.cast(symbols[symbol], ctypes.c_void_p).value
                for symbol in ("torch_parallel_for", "torch_get_num_threads")
            )
        except (OSError, AttributeError):
            continue
    logger.warning(
        "torch %s has no torch_parallel_for: aarch64_neon kernels run on one thread; torch 2.10 or newer has it",
        torch.__version__,
    )
    return None, None


_attach_lock = threading.Lock()
_attached: ctypes.CDLL | None = None


def _attach() -> ctypes.CDLL:
    """The library, with torch's threads handed in; once per process."""
    global _attached
    with _attach_lock:
        if _attached is None:
            library = native.load_library()
            library.int8moe_set_parallel(*_torch_threads())
            os.register_at_fork(after_in_child=_after_fork)
            _attached = library
        return _attached


def _after_fork() -> None:
    """In the child: forget the scratch list, and run serially where torch's pool did not survive."""
    global _attach_lock
    _attach_lock = threading.Lock()  # the thread that held it may not be there
    if _attached is not None:
        _attached.int8moe_after_fork()
        if not forked_with_threads():
            _attached.int8moe_set_parallel(*_torch_threads())


class _Prepared(NamedTuple):
    """Cached in ``layer.prepared``: the native descriptor, and the tensors whose memory it names."""

    descriptor: bytes
    keep: tuple[Tensor | None, ...]


def _halves(config: MoEConfig) -> int:
    return 2 if config.is_gated else 1


def _fp32(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().to(torch.float32).contiguous()


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


class Aarch64Experts:
    """Hooks of one tier; stateless but for the library handle."""

    tier: str

    def __init__(self) -> None:
        self._library = _attach()
        self._tier = native.tier_index(self._library, self.tier)
        self._forward = self._library.int8moe_forward

    @hookimpl
    def packed_expert_nbytes(self, config: MoEConfig) -> tuple[int, int]:
        """Bytes of one packed expert's w13 and w2."""
        size = self._library.int8moe_packed_bytes
        hidden, inner = config.hidden_size, config.intermediate_size
        return size(_halves(config), inner, hidden), size(1, hidden, inner)

    @hookimpl
    def process_weights_after_loading(self, layer: ExpertWeights) -> WeightLayout:
        """Pack in the layer's storage; extra memory is one panel per worker, or one expert where padding is needed."""
        config = layer.config
        sizes = self.packed_expert_nbytes(config)
        self._repack(layer, self._library.int8moe_pack, "packing")
        for name in ("w13_weight", "w2_weight"):
            setattr(layer, name, layer.expert_bytes(name))
        layer.prepared = None
        return WeightLayout(
            namespace="aarch64_neon",
            name=native.LAYOUT_NAME,
            version=native.LAYOUT_VERSION,
            nbytes=config.local_experts * sum(sizes),
        )

    @hookimpl
    def restore_weights(self, layer: ExpertWeights) -> None:
        """Back to canonical, in place."""
        layer.prepared = None
        self._repack(layer, self._library.int8moe_unpack, "unpacking")
        for name in ("w13_weight", "w2_weight"):
            setattr(layer, name, layer.canonical_view(name))

    @hookimpl
    def release_scratch(self) -> None:
        """Free the scratch memory that is kept between calls, of all tiers."""
        self._library.int8moe_release_scratch()

    @hookimpl
    def run_peak(self, iterations: int) -> int:
        """Multiply-adds done by all threads in ``iterations`` rounds of the tier's fastest loop."""
        return int(self._library.int8moe_run_peak(self._tier, thread_limit(), iterations))

    @hookimpl
    def read_memory(self, buffer: Tensor) -> None:
        """Read every byte once, in the threads of a forward."""
        if not buffer.is_contiguous():
            raise ValueError(f"read_memory needs a contiguous buffer, got strides {buffer.stride()}")
        self._library.int8moe_read_memory(self._tier, thread_limit(), buffer.data_ptr(), buffer.nbytes)

    def _repack(self, layer: ExpertWeights, function: Any, what: str) -> None:
        config = layer.config
        hidden, inner = config.hidden_size, config.intermediate_size
        for name, halves, rows, depth in (
            ("w13_weight", _halves(config), inner, hidden),
            ("w2_weight", 1, hidden, inner),
        ):
            storage = layer.expert_bytes(name)
            needed = self._library.int8moe_packed_bytes(halves, rows, depth)
            if storage.shape[1] < needed or storage.stride(1) != 1:
                raise RuntimeError(
                    f"{what} {name}: the layer gives {storage.shape[1]} bytes an expert, this layout needs {needed}"
                )
            call = native.PACK_CALL.pack(
                native.PACK_CALL.size,
                thread_limit(),
                storage.data_ptr(),
                storage.stride(0),
                storage.shape[0],
                halves,
                rows,
                depth,
            )
            native.check(self._library, function(call), f"{what} {name}")

    def _prepare(self, layer: ExpertWeights) -> _Prepared:
        config = layer.config
        w13, w2 = layer.expert_bytes("w13_weight"), layer.expert_bytes("w2_weight")
        expert_map = layer.expert_map
        if expert_map is not None:
            expert_map = expert_map.detach().to(device="cpu", dtype=torch.int32).contiguous()
        values = [_fp32(t) for t in (layer.w13_weight_scale, layer.w2_weight_scale, layer.w13_bias, layer.w2_bias)]
        descriptor = native.LAYER.pack(
            native.LAYER.size,
            native.DRIVER_VERSION,
            self._tier,
            ACTIVATIONS.index(config.activation),
            config.num_experts,
            config.local_experts,
            config.hidden_size,
            config.intermediate_size,
            w13.data_ptr(),
            w13.stride(0),
            w2.data_ptr(),
            w2.stride(0),
            *map(_pointer, values),
            _pointer(expert_map),
            config.swiglu_alpha,
            config.swiglu_limit,
            int(config.apply_router_weight_on_input),
            0,
        )
        prepared = _Prepared(descriptor, (w13, w2, *values, expert_map))
        layer.prepared = prepared
        return prepared

    @hookimpl
    def apply(
        self, layer: ExpertWeights, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor, out: Tensor
    ) -> None:
        """Write ``out [M, H]``; any strides of the inputs are taken as they are."""
        prepared: Any = layer.prepared or self._prepare(layer)
        codes = _DTYPE_CODES
        weights_code = codes.get(topk_weights.dtype)
        if weights_code is None:
            topk_weights = topk_weights.to(torch.float32)
            weights_code = native.F32
        tokens, top_k = topk_ids.shape
        status = self._forward(
            prepared.descriptor,
            _CALL_PACK(
                _CALL_SIZE,
                thread_limit(),
                tokens,
                top_k,
                hidden_states.data_ptr(),
                *hidden_states.stride(),
                topk_weights.data_ptr(),
                *topk_weights.stride(),
                topk_ids.data_ptr(),
                *topk_ids.stride(),
                out.data_ptr(),
                codes[hidden_states.dtype],
                weights_code,
                codes[topk_ids.dtype],
                0,
            ),
        )
        if status:
            native.check(self._library, status, "int8moe_forward")

    @hookimpl
    def apply_rows(
        self,
        layer: ExpertWeights,
        rows: Tensor,
        row_scales: Tensor | None,
        num_tokens_per_expert: Tensor,
        out: Tensor,
    ) -> None:
        """Write the un-weighted fp32 rows of step 7."""
        prepared: Any = layer.prepared or self._prepare(layer)
        scales = _fp32(row_scales)
        status = self._library.int8moe_forward_rows(
            prepared.descriptor,
            native.ROWS_CALL.pack(
                native.ROWS_CALL.size,
                thread_limit(),
                rows.shape[0],
                rows.data_ptr(),
                *rows.stride(),
                _pointer(scales),
                1,
                num_tokens_per_expert.data_ptr(),
                num_tokens_per_expert.stride(0),
                out.data_ptr(),
                _DTYPE_CODES[rows.dtype],
                _DTYPE_CODES[num_tokens_per_expert.dtype],
            ),
        )
        native.check(self._library, status, "int8moe_forward_rows")


class NeonExperts(Aarch64Experts):
    """``aarch64_neon.neon``."""

    tier = "neon"


class DotprodExperts(Aarch64Experts):
    """``aarch64_neon.dotprod``."""

    tier = "dotprod"


class I8mmExperts(Aarch64Experts):
    """``aarch64_neon.i8mm``."""

    tier = "i8mm"
