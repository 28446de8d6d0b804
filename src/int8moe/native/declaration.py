"""The kernels of a plugin on the driver, as its provider declares them: one a tier. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

from ..contracts import ACTIVATIONS, HIDDEN_DTYPES, PLUGIN_API_VERSION, KernelSpec, Numerics, WeightLayout
from .library import LibraryUnavailable, NativeLibrary

FEATURES = ("bias", "no_gate", "expert_map", "apply_router_weight_on_input")
"""What the driver can do beyond the plain layer, on every tier."""

Facts = TypeVar("Facts")


class Tier(NamedTuple):
    """One tier of a library.

    Attributes:
        isa: feature sets in the words of the system, any one of which is enough; () = any machine.
        priority: of its kernel.
        experts: its class in ``experts.py``.
    """

    isa: tuple[tuple[str, ...], ...]
    priority: int
    experts: str


def declare_tiers(
    library: NativeLibrary,
    layout: WeightLayout,
    tiers: Mapping[str, Tier],
    *,
    read_cpu: Callable[[], Facts],
    refusal: Callable[[str, Facts], str | None],
) -> list[KernelSpec]:
    """A kernel ``<namespace>.<tier>`` for each tier; one that cannot run here is unavailable, with the reason.

    Args:
        library: the plugin's.
        layout: of all tiers; its namespace is the plugin's.
        tiers: by name, weakest first.
        read_cpu: what the processor and the system can do; may raise LibraryUnavailable.
        refusal: why a tier cannot run with these facts; None when it can.
    """
    reasons = _reasons(library, tiers, read_cpu, refusal)
    return [
        KernelSpec(
            name=f"{layout.namespace}.{name}",
            target=f"{library.package}.experts:{tier.experts}",
            api_version=PLUGIN_API_VERSION,
            device="cpu",
            isa=tier.isa,
            activations=ACTIVATIONS,
            dtypes=HIDDEN_DTYPES,
            features=FEATURES,
            layout=layout.name,
            numerics=Numerics.bitwise(),
            priority=tier.priority,
            unavailable=reasons[name],
        )
        for name, tier in tiers.items()
    ]


def _reasons(
    library: NativeLibrary,
    tiers: Mapping[str, Tier],
    read_cpu: Callable[[], Facts],
    refusal: Callable[[str, Facts], str | None],
) -> dict[str, str | None]:
    """Why each tier cannot run here; what the machine lacks comes before what the library lacks."""
    try:
        built, facts = library.built_tiers(), read_cpu()
    except LibraryUnavailable as error:
        return dict.fromkeys(tiers, str(error))
    return {name: refusal(name, facts) or (None if name in built else library.not_built) for name in tiers}
