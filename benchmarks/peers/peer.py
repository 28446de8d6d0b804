"""What a file of ``adapters/`` defines: rows of the comparison, and how a layer is packed and called.

Runs in foreign environments: Python 3.9, nothing imported but the standard library. torch is there when an adapter's
methods run.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from shapes import Shape

if TYPE_CHECKING:
    from torch import Tensor

    from layer_data import Weights

ADAPTERS = Path(__file__).resolve().parent / "adapters"


class CannotRun(Exception):
    """Raised by an adapter where this machine or environment lacks what the peer needs; says what."""


class Peer(NamedTuple):
    """One row of the comparison. An adapter file lists its own in ``PEERS``."""

    name: str
    about: str
    """What runs, in a few words."""
    environment: str
    """Folder below $PEERS_DIR whose interpreter runs it; what --python names."""
    adapter: str
    """Class in the same file."""
    weight_bytes: int = 1
    """Bytes that one packed weight takes."""
    variables: tuple[tuple[str, str], ...] = ()
    """Environment variables of its worker; {environment} is the environment's folder, {threads} their number."""
    bind_threads: bool = True
    """Whether OMP_PROC_BIND is set: where threads wander, a busy machine puts two on one core."""
    own_python: bool = False
    """Whether the interpreter of the runner will do, where $PEERS_DIR has no such folder."""
    limit: float = 600.0
    """Seconds that one answer of its worker may take."""


class Adapter:
    """How a peer packs and calls one layer. Errors become the reason in the peer's row."""

    def __init__(self, shape: Shape, threads: int, max_tokens: int) -> None:
        """Load the peer's library.

        Args:
            shape: sizes of the layer.
            threads: threads that the peer may use; OMP_NUM_THREADS is set to it before.
            max_tokens: most rows of a call.
        """
        self.shape = shape
        self.threads = threads
        self.max_tokens = max_tokens

    def version(self) -> str:
        """Name and version of what runs, asked for after the layers are packed."""
        raise NotImplementedError

    def pack(self, weights: Weights) -> Any:
        """One layer as the peer wants it; may write to the given weights."""
        raise NotImplementedError

    def prepare_ids(self, topk_ids: Tensor) -> Tensor:
        """The ids [M, k] int32 as the peer wants them; not timed."""
        return topk_ids

    def run(self, packed: Any, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """One timed call.

        Args:
            packed: what :meth:`pack` returned.
            hidden_states: [M, H] bfloat16.
            topk_ids: [M, k], as :meth:`prepare_ids` returned them.
            topk_weights: [M, k] float32, each row sums to 1.

        Returns:
            [M, H] bfloat16.
        """
        raise NotImplementedError


def load_adapter_file(path: Path) -> ModuleType:
    """Import one file, under a name that shadows no package: kt_kernel.py imports the real kt_kernel."""
    spec = spec_from_file_location(f"adapters.{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def peers_of(folder: Path) -> Iterator[tuple[Path, Peer]]:
    """Every peer that a file of the folder defines, with that file."""
    for path in sorted(folder.glob("[!_]*.py")):
        for peer in getattr(load_adapter_file(path), "PEERS", ()):
            yield path, peer
