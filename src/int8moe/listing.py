"""Kernels and plugins as rows for people and programs. Imports no torch."""

from __future__ import annotations

from .contracts import HostInfo, KernelInfo, PluginInfo
from .host import this_host
from .registry import get_registry
from .selection import check_max_isa, machine_policy, machine_refusal


def list_kernels(host: HostInfo | None = None) -> list[KernelInfo]:
    """Every declared kernel, best first, with whether this machine can run it and why not."""
    candidates = get_registry().candidates()
    policy = machine_policy(hypothetical=host is not None)
    check_max_isa(policy.max_isa, candidates)
    rows = []
    for candidate in candidates:
        spec = candidate.spec
        reason = machine_refusal(candidate, host or this_host(), policy)
        rows.append(
            KernelInfo(
                name=spec.name,
                distribution=candidate.distribution,
                version=candidate.version,
                device=spec.device,
                isa=spec.isa,
                available=reason is None,
                reason=reason or "",
                layout=spec.layout,
                numerics=str(spec.numerics),
                priority=spec.priority,
            )
        )
    return sorted(rows, key=lambda row: (not row.available, -row.priority, row.name))


def why_not_here(name: str) -> str | None:
    """Why this machine cannot run one kernel; None when it can.

    Raises:
        NoKernelError: no kernel has that name.
    """
    registry = get_registry()
    candidate = registry.find(name)
    policy = machine_policy()
    check_max_isa(policy.max_isa, registry.candidates())
    return machine_refusal(candidate, this_host(), policy)


def list_plugins() -> list[PluginInfo]:
    """Every discovered provider with its state."""
    return [
        PluginInfo(
            name=record.name,
            distribution=record.distribution,
            version=record.version,
            state=record.state,
            error=record.error,
        )
        for record in get_registry().plugins()
    ]
