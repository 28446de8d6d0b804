"""What ``quantize_checkpoint`` refuses before it reads a tensor. Imports no torch: the command line asks first."""

from __future__ import annotations

from pathlib import Path

from ..errors import CheckpointError
from .plan import CheckpointPlan


def new_directory(destination: Path | str) -> Path:
    """The directory that is to be made.

    Raises:
        CheckpointError: the path names none, something is there, or the folder that it is to lie in is not.
    """
    target = Path(destination)
    if target.name in ("", ".."):
        raise CheckpointError(f"{destination}: names no new directory; give the name of one that is to be made")
    if target.exists() or target.is_symlink():
        raise CheckpointError(f"{target}: exists already; choose another destination, or remove it first")
    if not target.absolute().parent.is_dir():
        raise CheckpointError(f"{target.absolute().parent}: no such directory; make it first")
    return target


def refuse_quantized(plan: CheckpointPlan) -> None:
    """Raise CheckpointError for what is quantised already."""
    if plan.scheme != "unquantised" or any(layer.quantized for layer in plan.layers):
        raise CheckpointError(
            f"{plan.path}: is quantised already ({plan.scheme}); give the bf16, fp16 or fp32 checkpoint"
        )
