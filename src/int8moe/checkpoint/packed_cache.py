"""The packed cache: layers as a kernel has packed them, on disk, so that the next process only reads them.

A layer is a file of its own (:mod:`.packed_file`), named after checkpoint, layer and layout. It is used when what it
says it was made from is what would be read now; otherwise it is reported in one line, and written again.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import time
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import Tensor

from ..cache_folder import default_cache_directory, why_unwritable
from ..contracts import WeightLayout
from ..errors import CheckpointError, WeightLayoutError
from ..layer import FusedMoE
from ..parameters import WEIGHTS
from ..saved_state import load_state
from .checked_files import is_checked, note_checked
from .experts import LayerPlan
from .packed_file import DamagedFile, PackedFile, write_packed
from .plan import CheckpointPlan
from .safetensors_file import PARTIAL
from .stamps import Stamps, content_digest

__all__ = ["CacheOutcome", "PackedCache", "default_cache_directory"]

logger = logging.getLogger("int8moe.checkpoint")

READER_VERSION = 2
"""Raise it when the readers make other weights of the same files: caches of before are written again then."""

_ABANDONED_SECONDS = 3600.0


State = Literal["read", "written", "absent", "failed"]


class CacheOutcome(NamedTuple):
    """What the cache did for one layer.

    ``state``: "read" from it, "written" to it, "absent" from it and left so, or "failed" to be written.
    """

    state: State
    file: Path
    nbytes: int = 0
    seconds: float = 0.0


class PackedCache:
    """Packed layers in a folder, for :func:`int8moe.load_moe_layers`. One object serves one loading thread.

    Args:
        directory: the folder; None = default_cache_directory().
        create: write layers that are not there. Otherwise only those that are there and cannot be used are
            written again.
        required: raise when a layer cannot be written; otherwise that is logged, and the work goes on.
        mmap: map the weights instead of reading them: they come into memory when they are used, are shared by
            processes, and are copied where somebody writes to them. Their digests are not checked, and they lie on
            small pages, which costs read bandwidth.

    Attributes:
        outcomes: what was done for each layer, by key.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        create: bool = True,
        required: bool = False,
        mmap: bool = False,
    ) -> None:
        self.directory = default_cache_directory() if directory is None else Path(directory)
        self.outcomes: dict[str, CacheOutcome] = {}
        self._create, self._required, self._mmap = create, required, mmap
        self._pending: dict[str, dict[str, Any]] = {}
        self._stamps = Stamps()

    def file(self, plan: CheckpointPlan, layer: LayerPlan, layout: WeightLayout) -> Path:
        """Where a layer in a layout is kept: one folder a checkpoint, one file a layer and layout."""
        source = plan.path.resolve()
        folder = f"{_plain(source.name)}-{hashlib.sha256(os.fsencode(source)).hexdigest()[:12]}"
        return self.directory / folder / f"{_plain(layer.key)}.{layout.namespace}-{layout.name}.safetensors"

    def load(self, plan: CheckpointPlan, layer: LayerPlan, module: FusedMoE) -> bool:
        """Fill an empty layer, if the cache holds it as it would be packed now.

        Returns:
            Whether ``module`` is packed now. If not, the weights are read from the checkpoint, and handed to
            :meth:`store` once they are packed.
        """
        layout = module.kernel.layout
        if layout is None:
            logger.info("%s: not cached, as kernel %s was not self-tested", layer.key, module.kernel.name)
            return False
        started = time.perf_counter()
        file = self.file(plan, layer, layout)
        if not self._create and not os.path.lexists(file):
            self.outcomes[layer.key] = CacheOutcome("absent", file)
            return False
        identity = self._identity(plan, layer, layout)
        problem = None
        try:
            with PackedFile(file) as packed:
                problem = _difference(packed.identity, identity)
                if problem is None:
                    packed.check_digests = not is_checked(file, packed.status)
                    _fill(module, packed, self._mmap)
                    if packed.check_digests and not self._mmap:
                        note_checked(file, packed.status, packed.current_status())
                    seconds = time.perf_counter() - started
                    self.outcomes[layer.key] = CacheOutcome("read", file, packed.nbytes, seconds)
                    return True
        except (FileNotFoundError, NotADirectoryError):
            if not self._create:
                self.outcomes[layer.key] = CacheOutcome("absent", file)
                return False
        except DamagedFile as error:
            problem = f"damaged: it {error}"
        except WeightLayoutError as error:
            problem = f"damaged: {error}"
        except OSError as error:
            problem = f"unreadable: {error.strerror}"
        if problem is not None:
            logger.warning("packed cache %s is %s; it is written again", file, problem)
        self._pending[layer.key] = identity
        return False

    def store(self, plan: CheckpointPlan, layer: LayerPlan, module: FusedMoE) -> None:
        """Write a packed layer, if :meth:`load` found that it should be.

        Raises:
            CheckpointError: it cannot be written, and ``required`` says that this matters.
        """
        identity = self._pending.pop(layer.key, None)
        layout = module.weight_layout
        if identity is None or layout is None:
            return
        started = time.perf_counter()
        file = self.file(plan, layer, layout)
        nbytes, reason = 0, None
        if identity != self._identity(plan, layer, layout):
            reason = "the checkpoint changed while it was read; do it again"
        else:
            try:
                nbytes = write_packed(file, *_saved_form(module, identity))
                _remove_abandoned(file.parent)
            except OSError as error:
                reason = why_unwritable(error)
        state: State = "written" if reason is None else "failed"
        self.outcomes[layer.key] = CacheOutcome(state, file, nbytes, time.perf_counter() - started)
        if reason is not None:
            if self._required:
                raise CheckpointError(f"packed cache {file} cannot be written: {reason}")
            logger.warning("packed cache %s cannot be written (going on without): %s", file, reason)

    def _identity(self, plan: CheckpointPlan, layer: LayerPlan, layout: WeightLayout) -> dict[str, Any]:
        """What the packed bytes depend on, as JSON has it."""
        files = {entry.file for parts in layer.experts for part in parts for entry in part.entries()}
        config_file = plan.path / "config.json"
        return {
            "layout": layout.tag,
            "reader": READER_VERSION,
            "key": layer.key,
            "config": layer.config.model_dump(mode="json", exclude={"top_k"}),  # of which no weight depends
            "source": {
                config_file.name: content_digest(config_file),
                **{file.relative_to(plan.path).as_posix(): self._stamps.of(file) for file in sorted(files)},
            },
        }


def _difference(found: dict[str, Any], wanted: dict[str, Any]) -> str | None:
    """Why a file that says it is ``found`` cannot stand for ``wanted``; None when it can."""
    if found == wanted:
        return None
    if found.get("layout") != wanted["layout"]:
        return f"foreign: packed as {found.get('layout')}, and this kernel reads {wanted['layout']}"
    if found.get("reader") != wanted["reader"]:
        return "stale: made by another version of int8moe"
    stored = found.get("source")
    source = stored if isinstance(stored, dict) else {}
    names = {*source, *wanted["source"]}
    changed = sorted(name for name in names if source.get(name) != wanted["source"].get(name))
    if changed:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        return f"stale: {changed[0]}{more} of the checkpoint changed since"
    return "foreign: made for another layer"


def _fill(module: FusedMoE, packed: PackedFile, mmap: bool) -> None:
    """Read a file into the storage of an empty layer, or map it, as load_state_dict would."""

    def fill(name: str, target: Tensor, stored: Tensor) -> Tensor | None:
        if mmap and name in WEIGHTS and target.device.type == "cpu" and target.is_contiguous():
            mapped = packed.map(name)
            if mapped is not None:
                return mapped
        packed.read_into(name, target)
        return None

    state: dict[str, Any] = {**packed.meta_tensors(), "_extra_state": packed.extra_state}
    missing: list[str] = []
    load_state(module, state, "", missing, fill=fill)
    if missing:
        raise DamagedFile(f"lacks {', '.join(missing)}")


def _saved_form(module: FusedMoE, identity: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]:
    """What of a layer's state_dict goes into the file: its tensors, and the part of its extra state that JSON holds."""
    state = module.state_dict()
    extra = {name: value for name, value in state.pop("_extra_state").items() if name != "generation"}
    return dict(state), identity, extra


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", name) or "_"


def _remove_abandoned(folder: Path) -> None:
    """Remove what processes that were killed have left; one that is being written has a recent time."""
    oldest = time.time() - _ABANDONED_SECONDS
    for partial in folder.glob(f".*{PARTIAL}"):
        with contextlib.suppress(OSError):
            if partial.stat().st_mtime < oldest:
                partial.unlink()
