"""Real checkpoints, read expert by expert. Names are handed on lazily: looking at one imports no torch.

Order of work, each step before the next: ``models`` reads config.json by its row of ``families``, ``schemes`` finds
the method of quantisation (``compressed_tensors``, ``w8a8_int8``, ``quark``, ``modelslim``), ``files`` checks the
headers of the safetensors files (``unknown_model`` reads names and sizes from them where the table has no row),
``experts`` and ``layer_check`` match every stored expert tensor with its one use, ``plan`` holds the outcome,
``load`` copies, and ``packed_cache`` keeps what a kernel packed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .load import Progress, load_moe_layers, load_router, load_router_biases
    from .packed_cache import CacheOutcome, PackedCache, default_cache_directory
    from .plan import CheckpointPlan, LayerPlan, Routing, SkippedLayer, inspect_checkpoint
    from .w8a8_writer import QuantizedCheckpoint, quantize_checkpoint

__all__ = [
    "CacheOutcome",
    "CheckpointPlan",
    "LayerPlan",
    "PackedCache",
    "Progress",
    "QuantizedCheckpoint",
    "Routing",
    "SkippedLayer",
    "default_cache_directory",
    "inspect_checkpoint",
    "load_moe_layers",
    "load_router",
    "load_router_biases",
    "quantize_checkpoint",
]

_HOME = {
    "load": ("Progress", "load_moe_layers", "load_router", "load_router_biases"),
    "packed_cache": ("CacheOutcome", "PackedCache", "default_cache_directory"),
    "w8a8_writer": ("QuantizedCheckpoint", "quantize_checkpoint"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f".{_MODULE_OF.get(name, 'plan')}", __name__)
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
