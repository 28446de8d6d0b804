"""What the plugins declare, found out in a process of its own; a plugin that ends it is named and left out."""

from __future__ import annotations

from typing import NamedTuple

from .outcome import Outcome
from .probe_process import Probes

REFERENCE = "reference"
"""Name of the built-in provider."""

_MOST_ATTEMPTS = 16


class KernelReading(NamedTuple):
    """One declared kernel.

    Attributes:
        unavailable: what the plugin's own probe found against this machine; None = nothing.
        refusal: why this machine cannot run it under the present settings; None = it can.
    """

    name: str
    distribution: str
    device: str
    isa: list[list[str]]
    priority: int
    unavailable: str | None
    refusal: str | None

    @property
    def namespace(self) -> str:
        """Name of the plugin, as INT8MOE_DISABLE_PLUGINS takes it."""
        return self.name.partition(".")[0]


class PluginReading(NamedTuple):
    """One provider: a PluginRecord, with the number of its kernels."""

    name: str
    distribution: str
    version: str
    value: str
    state: str
    error: str
    traceback: str
    num_kernels: int


class EndedPlugin(NamedTuple):
    """A plugin whose import or hook ended the process: how, and the last lines of stderr."""

    name: str
    distribution: str
    ended: str
    stderr: str


class Discovery(NamedTuple):
    """All plugins and kernels.

    Attributes:
        hints: distributions that would serve this machine and are not installed.
        max_isa_fault, pinned_fault: what is wrong with INT8MOE_MAX_ISA and INT8MOE_KERNEL, or None.
        ended_plugins: those that were left out at the last attempt.
        outcome: of the last attempt; its ``ended`` is not "" when no plugin could be named for what happened.
    """

    plugins: tuple[PluginReading, ...] = ()
    kernels: tuple[KernelReading, ...] = ()
    hints: tuple[str, ...] = ()
    max_isa_fault: str | None = None
    pinned_fault: str | None = None
    ended_plugins: tuple[EndedPlugin, ...] = ()
    outcome: Outcome = Outcome()

    @property
    def native_kernels(self) -> list[KernelReading]:
        """The kernels that plugins brought."""
        return [kernel for kernel in self.kernels if kernel.namespace != REFERENCE]


def discover(probes: Probes) -> Discovery:
    """Load every plugin; again without the one that ended the process, until the rest can be read.

    Probes that are started later leave it out, too.
    """
    ended: list[EndedPlugin] = []
    while True:
        outcome = probes.start("discovery").result()
        if outcome.last("plugins") is not None or len(ended) == _MOST_ATTEMPTS:
            break
        name, distribution = outcome.last("loading") or ("", "")
        if not name or any(name == other.name for other in ended):
            break
        ended.append(EndedPlugin(name, distribution, outcome.how_it_ended, outcome.stderr))
        blocked = filter(None, [probes.environment.get("INT8MOE_DISABLE_PLUGINS", ""), name])
        probes.environment = {**probes.environment, "INT8MOE_DISABLE_PLUGINS": ",".join(blocked)}
    return Discovery(
        plugins=tuple(PluginReading(**row) for row in outcome.last("plugins") or ()),
        kernels=tuple(KernelReading(**row) for row in outcome.last("kernels") or ()),
        hints=tuple(outcome.last("hints") or ()),
        max_isa_fault=outcome.last("max_isa_fault"),
        pinned_fault=outcome.last("pinned_fault"),
        ended_plugins=tuple(ended),
        outcome=outcome,
    )
