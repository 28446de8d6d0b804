"""Where ``int8moe run`` takes layers from. No torch here: what is wrong with a checkpoint is told at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..checkpoint import CheckpointPlan, LayerPlan, SkippedLayer, inspect_checkpoint
from ..contracts import MoEConfig
from ..errors import CheckpointError

if TYPE_CHECKING:
    from ..checkpoint import PackedCache
    from .source_layers import SourceLayer

EXAMPLE = Path("examples") / "tiny-qwen3-moe-w8a8"
SEEDED = MoEConfig(num_experts=16, top_k=4, hidden_size=256, intermediate_size=128)


def find_example() -> Path | None:
    """The checkpoint that a checkout carries: beside this package's source, or below the current folder."""
    for root in (Path(__file__).resolve().parents[3], Path.cwd()):
        if (root / EXAMPLE / "config.json").is_file():
            return root / EXAMPLE
    return None


@dataclass(frozen=True)
class Source:
    """What ``int8moe run`` runs.

    Attributes:
        title: for people: which checkpoint, of what kind.
        config: what the layers compute.
        plan: the checkpoint; None for a layer made in memory.
        chosen: its layers that are run, in order.
        unquantized: those that the checkpoint leaves unquantised, and that are not run.
    """

    title: str
    config: MoEConfig
    plan: CheckpointPlan | None = None
    chosen: tuple[LayerPlan, ...] = ()
    unquantized: tuple[LayerPlan, ...] = ()

    @property
    def quantized_on_load(self) -> tuple[LayerPlan, ...]:
        """The chosen layers that are stored in floats."""
        return tuple(layer for layer in self.chosen if not layer.quantized)

    @property
    def skipped(self) -> tuple[SkippedLayer, ...]:
        """What the checkpoint holds besides the model."""
        return () if self.plan is None else self.plan.skipped

    def layers(self, seed: int, cache: PackedCache | None = None) -> list[SourceLayer]:
        """The layers themselves, from the packed cache where they are in it. From here on torch is needed."""
        from .source_layers import CheckpointLayer, SeededLayer

        if self.plan is None:
            return [SeededLayer(self.config, seed)]
        return [CheckpointLayer(self.plan, layer, cache) for layer in self.chosen]


def open_source(path: str | None, *, layers: Sequence[int] | None, quantize: bool) -> Source:
    """The checkpoint at ``path``; without one the example of a checkout, else one seeded layer.

    Raises:
        CheckpointError: it cannot be read, has no such layer, or leaves all of them unquantised.
    """
    found = Path(path) if path is not None else find_example()
    if found is None:
        return Source(f"none: one seeded layer made in memory, {_sizes(SEEDED)} ({EXAMPLE} is not here)", SEEDED)
    plan = inspect_checkpoint(found)
    wanted = plan.layers if layers is None else tuple(plan.layer(index) for index in layers)
    chosen = tuple(layer for layer in wanted if layer.quantized or quantize)
    if not chosen:
        names = ", ".join(layer.key for layer in wanted)
        raise CheckpointError(
            f"{found}: left unquantised are {names}, so there is nothing to run; --quantize quantises them"
        )
    default = "" if path is not None else ", the default"
    return Source(
        title=f"{found} ({plan.model_type}, {plan.scheme}{default}); {len(chosen)} of {len(plan.layers)} MoE layers, "
        f"{_sizes(chosen[0].config)}",
        config=chosen[0].config,
        plan=plan,
        chosen=chosen,
        unquantized=tuple(layer for layer in wanted if layer not in chosen),
    )


def _sizes(config: MoEConfig) -> str:
    return (
        f"{config.num_experts} experts, top-{config.top_k}, hidden {config.hidden_size}, "
        f"intermediate {config.intermediate_size}"
    )
