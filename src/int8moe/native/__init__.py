"""The Python half of a plugin whose kernels are built on the headers of ``int8moe.get_include()``.

A plugin states its shared library (:class:`NativeLibrary`), declares its tiers (:func:`declare_tiers`) and subclasses
:class:`.experts.NativeExperts`, one class a tier; its own probe says what the machine can run. :mod:`.experts` and
:mod:`.threads` import torch, the rest does not.
"""

from .declaration import Tier, declare_tiers
from .library import LibraryUnavailable, NativeLibrary

__all__ = ["LibraryUnavailable", "NativeLibrary", "Tier", "declare_tiers"]
