"""Which kernel serves a config on a host: a pure function of config, host, candidates and policy. No torch.

Loading comes after: :func:`int8moe.binding.choose` walks the ranking that is made here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from . import environment
from .contracts import MAX_REDUCTION, HostInfo, KernelSpec, MoEConfig, Rejection
from .errors import ConfigError, NoKernelError
from .near_names import near_names
from .registry import Candidate, unknown_kernel


@dataclass(frozen=True)
class Policy:
    """What the user asked for.

    Attributes:
        kernel: the kernel to use and no other; None = the best.
        pinned_by: where that name is from, for the report.
        max_isa: highest rung of a provider's isa_ladder for automatic selection.
        device: torch device type.
        scheme: quantisation scheme of the weights.
        hypothetical: the host is not this machine, so that what plugins found out about this one is no reason.
    """

    kernel: str | None = None
    pinned_by: str | None = None
    max_isa: str | None = None
    device: str = "cpu"
    scheme: str = "w8a8"
    hypothetical: bool = False


@dataclass(frozen=True)
class Ranking:
    """Usable candidates, best first, and the refused ones with their reasons."""

    usable: tuple[Candidate, ...]
    rejected: tuple[Rejection, ...]


def policy_from_environment(kernel: str | None, device: object, *, hypothetical: bool = False) -> Policy:
    """The policy of one selection: the argument wins over INT8MOE_KERNEL."""
    pinned_by = "kernel=" if kernel is not None else None
    if kernel is None and (kernel := environment.text("INT8MOE_KERNEL")) is not None:
        pinned_by = "INT8MOE_KERNEL"
    return Policy(
        kernel=kernel,
        pinned_by=pinned_by,
        max_isa=environment.text("INT8MOE_MAX_ISA"),
        device=str(device).partition(":")[0],
        hypothetical=hypothetical,
    )


def rank(config: MoEConfig, host: HostInfo, candidates: Iterable[Candidate], policy: Policy) -> Ranking:
    """Sort the candidates that can serve ``config`` on ``host``; refuse the others, each with a reason.

    Raises:
        NoKernelError: the policy pins a kernel, and that one is refused.
    """
    pool = list(candidates)
    check_max_isa(policy.max_isa, pool)
    if policy.kernel is not None:
        return _rank_pinned(config, host, pool, policy)
    usable: list[Candidate] = []
    rejected: list[Rejection] = []
    for candidate in sorted(pool, key=_order):
        reason = refusal(candidate, config, host, policy)
        if reason is None:
            usable.append(candidate)
        else:
            rejected.append(Rejection(candidate.spec.name, candidate.distribution, reason))
    return Ranking(tuple(usable), tuple(rejected))


def _order(candidate: Candidate) -> tuple[int, str]:
    return -candidate.spec.priority, candidate.spec.name


def _rank_pinned(config: MoEConfig, host: HostInfo, pool: list[Candidate], policy: Policy) -> Ranking:
    candidate = next((c for c in pool if c.spec.name == policy.kernel), None)
    if candidate is None:
        assert policy.kernel is not None
        raise NoKernelError(unknown_kernel(policy.kernel, pool))
    others = tuple(
        Rejection(c.spec.name, c.distribution, f"{policy.pinned_by} names {policy.kernel}")
        for c in sorted(pool, key=_order)
        if c is not candidate
    )
    reason = refusal(candidate, config, host, policy)
    if reason is not None:
        device = candidate.spec.device
        advice = "" if device == policy.device else (
            f"device={device!r} asks for it in Python, and --device in `int8moe explain`; the commands that run layers "
            "(run, bench, pack, generate, eval) are for the CPU. "
        )  # fmt: skip
        raise NoKernelError(
            f"kernel {policy.kernel!r} (named by {policy.pinned_by}) cannot be used: {reason}. {advice}"
            "Name another kernel, or none to let int8moe choose; `int8moe explain` shows every candidate."
        )
    return Ranking((candidate,), others)


def refusal(candidate: Candidate, config: MoEConfig, host: HostInfo, policy: Policy) -> str | None:
    """Why this candidate cannot serve, or None when it can."""
    spec = candidate.spec
    if spec.device != policy.device:
        return f"is for device {spec.device}, wanted is {policy.device}"
    reason = machine_refusal(candidate, host, policy)
    if reason is not None:
        return reason
    if policy.kernel is None:
        if not spec.auto_select:
            return "is used only when it is named (auto_select is off)"
        if spec.device == "cpu" and spec.numerics.kind != "bitwise":
            return f"is not bitwise and so used only when it is named: {spec.numerics}"
    return _config_refusal(spec, config, policy.scheme)


def _config_refusal(spec: KernelSpec, config: MoEConfig, scheme: str) -> str | None:
    for name, size in (("hidden_size", config.hidden_size), ("intermediate_size", config.intermediate_size)):
        if size > MAX_REDUCTION:
            return f"{name} {size:,} is above {MAX_REDUCTION:,}, beyond which int32 sums may overflow"
    if scheme not in spec.schemes:
        return f"serves the schemes {', '.join(spec.schemes)}, wanted is {scheme}"
    if config.activation not in spec.activations:
        return f"has no activation {config.activation}; it has {', '.join(spec.activations)}"
    if config.hidden_dtype is not None and config.hidden_dtype not in spec.dtypes:
        return f"takes {', '.join(spec.dtypes)}, wanted is {config.hidden_dtype}"
    missing = [feature for feature in config.needed_features if feature not in spec.features]
    if missing:
        return f"does not list the feature {', '.join(missing)}, which this config needs"
    return None


def machine_policy(*, hypothetical: bool = False) -> Policy:
    """The part of the policy that :func:`machine_refusal` reads, without a pinned kernel."""
    return Policy(max_isa=environment.text("INT8MOE_MAX_ISA"), hypothetical=hypothetical)


def machine_refusal(candidate: Candidate, host: HostInfo, policy: Policy) -> str | None:
    """Why the machine cannot run this kernel whatever the config, or None."""
    spec = candidate.spec
    if spec.unavailable is not None and not policy.hypothetical:
        return spec.unavailable
    if spec.isa and not any(set(feature_set) <= host.features for feature_set in spec.isa):
        closest = min(spec.isa, key=lambda feature_set: len(set(feature_set) - host.features))
        missing = [word for word in closest if word not in host.features]
        return f"needs {' + '.join(closest)}; this {host.machine} machine lacks {', '.join(missing)}"
    ladder = candidate.isa_ladder
    if policy.max_isa in ladder and spec.short_name in ladder:
        assert policy.max_isa is not None
        if ladder.index(spec.short_name) > ladder.index(policy.max_isa):
            return f"is above INT8MOE_MAX_ISA={policy.max_isa}"
    return None


def check_max_isa(value: str | None, candidates: Iterable[Candidate]) -> None:
    """Refuse an INT8MOE_MAX_ISA that stands on no provider's ladder."""
    if value is None:
        return
    ladders = {(c.spec.namespace, c.isa_ladder) for c in candidates if c.isa_ladder}
    rungs = [rung for _, ladder in sorted(ladders) for rung in ladder]
    if value not in rungs:
        near = near_names(value, rungs, count=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        known = "; ".join(f"{name}: {', '.join(ladder)}" for name, ladder in sorted(ladders))
        raise ConfigError(
            f"INT8MOE_MAX_ISA={value!r} is on no plugin's ladder; {hint}"
            f"known (weakest first): {known or 'none, no plugin has a ladder'}"
        )


def no_kernel_message(config: MoEConfig, rejected: Iterable[Rejection], advice: Iterable[str]) -> str:
    """The text of a NoKernelError: every candidate, every reason, then what to do."""
    lines = [f"no kernel can serve {config}:"]
    lines += [f"  {name} ({distribution}): {reason}" for name, distribution, reason in rejected]
    lines += [f"  hint: {line}" for line in advice]
    lines.append("Change the config, or install a plugin that serves it; `int8moe list-kernels` shows what is here.")
    return "\n".join(lines)
