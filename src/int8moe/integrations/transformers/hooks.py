"""Switches the integration on and off: the only place that changes anything in transformers.

Two things are changed, and put back: the name ``get_hf_quantizer`` in ``transformers.modeling_utils``, through which
``from_pretrained`` asks who loads a quantised checkpoint, and the entry "int8moe" of the table of experts
implementations.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

from .versions import check_version

EXPERTS_IMPLEMENTATION = "int8moe"

_lock = threading.Lock()
_original: Callable[..., Any] | None = None
_pristine: Callable[..., Any] | None = None
"""What ours stands in front of; and what the first one stood in front of, which cannot lead back to ours."""
_inside = threading.local()
_enabled = False
_open = 0
_to_disable = False
"""Contexts that are entered now; and whether the one that switched the integration on has been left."""


class Enabled:
    """What :func:`enable` returns; as a context manager it undoes that call, once all others are left, too."""

    def __init__(self, changed: bool) -> None:
        self._changed = changed

    def __enter__(self) -> Enabled:
        global _open
        with _lock:
            _open += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _open, _to_disable
        with _lock:
            _open = max(0, _open - 1)
            _to_disable |= self._changed
            self._changed = False
            last = _to_disable and _open == 0  # others may be open that began later
        if last:
            disable()


def enable() -> Enabled:
    """Let transformers load and run INT8 experts, for the whole process; a second call changes nothing.

    Returns:
        A context manager for those who want it for a while only: ``with enable(): ...``. Models that were loaded
        keep their INT8 experts after it.

    Raises:
        ConfigError: transformers is absent, or its version is not tested.
    """
    global _enabled, _original, _pristine
    with _lock:
        if _enabled:
            return Enabled(changed=False)
        check_version()
        from transformers import modeling_utils
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        from .experts_function import experts_forward

        if modeling_utils.get_hf_quantizer is not _get_hf_quantizer:
            _original = modeling_utils.get_hf_quantizer
            _pristine = _pristine or _original
            modeling_utils.get_hf_quantizer = _get_hf_quantizer
        ALL_EXPERTS_FUNCTIONS.register(EXPERTS_IMPLEMENTATION, experts_forward)
        _enabled = True
        return Enabled(changed=True)


def disable() -> None:
    """Put transformers back as it was; a second call changes nothing."""
    global _enabled, _open, _to_disable
    with _lock:
        _open, _to_disable = 0, False
        if not _enabled:
            return
        from transformers import modeling_utils
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        # Somebody may have wrapped our function since: it stays below theirs then, and hands everything on.
        if modeling_utils.get_hf_quantizer is _get_hf_quantizer:
            modeling_utils.get_hf_quantizer = _original
        type(ALL_EXPERTS_FUNCTIONS)._global_mapping.pop(EXPERTS_IMPLEMENTATION, None)
        _enabled = False


def is_enabled() -> bool:
    """Whether :func:`enable` is in effect."""
    return _enabled


def _get_hf_quantizer(config: Any, quantization_config: Any, device_map: Any, *args: Any, **kwargs: Any) -> Any:
    """Answer for the checkpoints that int8moe loads; ask transformers for all others."""
    if _enabled and quantization_config is None and kwargs.get("gguf_file") is None:
        from .quantizer import find_quantizer

        quantizer = find_quantizer(config)
        if quantizer is not None:
            quantizer.validate_environment(device_map=device_map)
            return quantizer, config, device_map
    # Somebody may have wrapped ours while it was on, so that what it stands in front of now leads to it again.
    again = getattr(_inside, "call", False)
    following = _pristine if again else _original
    assert following is not None
    _inside.call = True
    try:
        return following(config, quantization_config, device_map, *args, **kwargs)
    finally:
        _inside.call = again
