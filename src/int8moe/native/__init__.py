"""The Python half of a plugin whose kernels are built on the headers of ``int8moe.get_include()``.

A plugin states its shared library (:class:`NativeLibrary`) and subclasses :class:`.experts.NativeExperts`, one class a
tier; its own probe says what the machine can run. :mod:`.experts` imports torch, the rest does not.
"""

from .library import LibraryUnavailable, NativeLibrary

__all__ = ["LibraryUnavailable", "NativeLibrary"]
