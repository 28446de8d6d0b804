"""Every exception that int8moe raises on purpose, under one root."""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DuplicateKernelError",
    "IncompatiblePluginError",
    "Int8MoEError",
    "NoKernelError",
    "PluginLoadError",
    "UnsupportedInputError",
    "WeightLayoutError",
]


class Int8MoEError(Exception):
    """Root of the tree. The text says what was found, what is allowed and what to do."""


class ConfigError(Int8MoEError, ValueError):
    """A MoEConfig, KernelSpec or environment variable that cannot be right."""


class UnsupportedInputError(Int8MoEError, ValueError):
    """A tensor handed to a layer has a shape, dtype or device that the layer does not take."""


class PluginLoadError(Int8MoEError):
    """A plugin or one of its kernels cannot be imported, or breaks the hook contract."""


class IncompatiblePluginError(PluginLoadError):
    """A kernel was written for another PLUGIN_API_VERSION or NUMERICS_VERSION."""


class DuplicateKernelError(PluginLoadError):
    """Two providers claim the same namespace or the same kernel name."""


class NoKernelError(Int8MoEError):
    """No kernel can serve a config here; carries every candidate's reason.

    Attributes:
        report: the SelectionReport with all rejections, or None when a name was unknown.
    """

    def __init__(self, message: str, report: object | None = None) -> None:
        super().__init__(message)
        self.report = report


class WeightLayoutError(Int8MoEError):
    """Weights are missing, in the wrong state, or packed for another kernel."""


class CheckpointError(Int8MoEError):
    """A checkpoint is damaged, incomplete, or in a format that is not supported."""
