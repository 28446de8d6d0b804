"""Writes the distribution of a new kernel plugin: what ``int8moe new-plugin`` does. Imports no torch.

``templates/`` holds its files as they are written, names between @ signs filled in: ``plugin`` those of every plugin,
``torch`` and ``native`` those of a kernel in plain torch and of one on the C++ driver.
"""

from __future__ import annotations

from .names import ANY_ISA, PluginNames, check_isa, check_namespace
from .write import NewPlugin, write_plugin

__all__ = ["ANY_ISA", "NewPlugin", "PluginNames", "check_isa", "check_namespace", "write_plugin"]
