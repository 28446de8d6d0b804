"""Makes Triton's interpreter several times faster for kernels that call functions, without a change of what it computes.

For a launch the interpreter replaces the functions of ``triton.language``, and puts them back afterwards. It looks for what
to replace again at each call of a function from a kernel, a search of milliseconds that finds nothing: all is replaced.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def skip_needless_searches() -> None:
    """Search only where nothing is replaced yet. Another version of triton, without these names, stays as it is."""
    search = getattr(interpreter, "_patch_lang", None)
    nothing = getattr(interpreter, "_LangPatchScope", None)
    if search is None or nothing is None:
        return

    def search_once(fn: Any) -> Any:
        # A kernel sees the one, the functions of Triton's own library see the other.
        modules = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        replaced = not any(tl.core.is_builtin(module.load) for module in modules)
        return nothing() if replaced else search(fn)

    interpreter._patch_lang = search_once
