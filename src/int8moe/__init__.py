"""int8moe: a plugin-based registry of INT8 W8A8 fused mixture-of-experts kernels.

Names are handed on when they are first used (PEP 562), so that a plugin's ``from int8moe import KernelSpec``
and the command line import no torch.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .binding import select_kernel as select_kernel
    from .checkpoint import load_moe_layers as load_moe_layers
    from .contracts import NUMERICS_VERSION as NUMERICS_VERSION
    from .contracts import PLUGIN_API_VERSION as PLUGIN_API_VERSION
    from .contracts import HostInfo as HostInfo
    from .contracts import KernelInfo as KernelInfo
    from .contracts import KernelSpec as KernelSpec
    from .contracts import MoEConfig as MoEConfig
    from .contracts import Numerics as Numerics
    from .contracts import PluginInfo as PluginInfo
    from .contracts import SelectionReport as SelectionReport
    from .contracts import Supported as Supported
    from .contracts import Unsupported as Unsupported
    from .contracts import WeightLayout as WeightLayout
    from .errors import CheckpointError as CheckpointError
    from .errors import ConfigError as ConfigError
    from .errors import DuplicateKernelError as DuplicateKernelError
    from .errors import IncompatiblePluginError as IncompatiblePluginError
    from .errors import Int8MoEError as Int8MoEError
    from .errors import NoKernelError as NoKernelError
    from .errors import PluginLoadError as PluginLoadError
    from .errors import UnsupportedInputError as UnsupportedInputError
    from .errors import WeightLayoutError as WeightLayoutError
    from .hookspecs import hookimpl as hookimpl
    from .layer import FusedMoE as FusedMoE
    from .listing import list_kernels as list_kernels
    from .quantize import quantize_experts as quantize_experts
    from .registry import register_kernel as register_kernel
    from .weights import ExpertWeights as ExpertWeights

_HOME = {
    "contracts": (
        "HostInfo", "KernelInfo", "KernelSpec", "MoEConfig", "NUMERICS_VERSION", "Numerics", "PLUGIN_API_VERSION",
        "PluginInfo", "SelectionReport", "Supported", "Unsupported", "WeightLayout",
    ),
    "errors": (
        "CheckpointError", "ConfigError", "DuplicateKernelError", "IncompatiblePluginError", "Int8MoEError",
        "NoKernelError", "PluginLoadError", "UnsupportedInputError", "WeightLayoutError",
    ),
    "hookspecs": ("hookimpl",),
    "listing": ("list_kernels",),
    "registry": ("register_kernel",),
    "binding": ("select_kernel",),
    "weights": ("ExpertWeights",),
    "layer": ("FusedMoE",),
    "quantize": ("quantize_experts",),
    "checkpoint": ("load_moe_layers",),
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}
_SUBMODULES = frozenset(
    {
        "binding", "checkpoint", "contracts", "errors", "hookspecs", "host", "layer", "listing", "native", "ops",
        "quantize", "reference", "registry", "routing", "selection", "testing", "weights",
    }
)  # fmt: skip

__all__ = sorted([*_MODULE_OF, "get_include"])


def get_include() -> str:
    """Folder to put on a C++ compiler's include path, for ``#include <int8moe/driver.h>``."""
    from pathlib import Path

    return str(Path(__file__).parent / "include")


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        value = getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)
    elif name in _SUBMODULES:
        value = importlib.import_module(f".{name}", __name__)
    elif name == "__version__":
        from importlib.metadata import version

        value = version(__name__)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})


if "torch" in sys.modules:
    # Where torch is here already it costs little, and torch.export.load finds the operator after a plain import.
    from . import ops as ops
