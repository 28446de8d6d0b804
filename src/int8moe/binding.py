"""Loads a chosen kernel, checks its hooks, and lets it prove itself on a known answer before it is used."""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

import pluggy
import torch

from .contracts import (
    HostInfo,
    KernelSpec,
    MoEConfig,
    Rejection,
    SelectionReport,
    Supported,
    Unsupported,
    WeightLayout,
)
from .errors import Int8MoEError, NoKernelError, PluginLoadError
from .hookspecs import PROJECT, REQUIRED_HOOKS, FusedMoEExperts
from .host import forked_with_threads, this_host
from .registry import Candidate, get_registry, hints
from .selection import machine_policy, machine_refusal, no_kernel_message, policy_from_environment, rank
from .self_test import self_test, self_test_config
from .signatures import check_hooks

logger = logging.getLogger("int8moe.binding")

_lock = threading.RLock()
_bound: dict[str, BoundKernel] = {}
_quarantined: dict[str, tuple[KernelSpec, str]] = {}
_fallbacks_told: set[tuple[str, str]] = set()


def _run_serially_in_child() -> None:
    if forked_with_threads():
        torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_run_serially_in_child)


class BoundKernel:
    """A kernel that is loaded, checked and self-tested: plain bound methods, pluggy is not in the way of calls.

    Attributes:
        name: "<namespace>.<kernel>".
        spec: what its provider declared.
        distribution: where it is from.
        layout: what its packing produced in the self-test; None where that did not run.
        apply, process_weights_after_loading: the required hooks.
        apply_rows, restore_weights, release_scratch, packed_expert_nbytes: the optional ones, or None.
    """

    def __init__(self, candidate: Candidate, implementation: Any) -> None:
        self.spec = candidate.spec
        self.name = candidate.spec.name
        self.distribution = candidate.distribution
        self.implementation = implementation
        self.process_weights_after_loading: Callable[..., Any] = implementation.process_weights_after_loading
        self.apply: Callable[..., Any] = implementation.apply
        self.apply_rows: Callable[..., Any] | None = getattr(implementation, "apply_rows", None)
        self.restore_weights: Callable[..., Any] | None = getattr(implementation, "restore_weights", None)
        self.packed_expert_nbytes: Callable[[MoEConfig], tuple[int, int]] | None = getattr(
            implementation, "packed_expert_nbytes", None
        )
        self.release_scratch: Callable[[], None] | None = getattr(implementation, "release_scratch", None)
        self.layout: WeightLayout | None = None
        self._is_supported: Callable[..., Any] | None = getattr(implementation, "is_supported_config", None)

    def refusal(self, config: MoEConfig, host: HostInfo) -> str | None:
        """The kernel's own reason against a config, or None."""
        if self._is_supported is None:
            return None
        answer = self._is_supported(config, host)
        if isinstance(answer, Supported):
            return None
        if isinstance(answer, Unsupported):
            return answer.reason
        raise PluginLoadError(
            f"kernel {self.name!r}: is_supported_config returned {answer!r}; return Supported() or Unsupported(reason)"
        )

    def __repr__(self) -> str:
        return f"BoundKernel({self.name!r})"


def check_kernel_class(spec: KernelSpec) -> object:
    """Import a kernel's class, make its one instance, and check the hooks of it.

    Raises:
        PluginLoadError: cannot be imported or made, or a hook is missing, misspelt or mis-signed.
    """
    owner = f"kernel {spec.name!r}"
    cls: Any = spec.target
    if isinstance(cls, str):
        module_name, _, attribute = cls.partition(":")
        try:
            cls = importlib.import_module(module_name)
            for part in attribute.split("."):
                cls = getattr(cls, part)
        except Exception as error:
            raise PluginLoadError(
                f"{owner}: target {spec.target!r} cannot be loaded: {type(error).__name__}: {error}"
            ) from error
    if not inspect.isclass(cls):
        raise PluginLoadError(f"{owner}: target {spec.target!r} is {cls!r}; name a class")
    try:
        implementation: object = cls()
    except Exception as error:
        raise PluginLoadError(f"{owner}: {cls.__qualname__}() failed: {type(error).__name__}: {error}") from error
    check_hooks(implementation, FusedMoEExperts, required=REQUIRED_HOOKS, owner=owner)
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(FusedMoEExperts)
    try:
        manager.register(implementation)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise PluginLoadError(f"{owner}: {' '.join(str(error).split())}") from None
    return implementation


def bind(name: str) -> BoundKernel:
    """Load a kernel by name, once per process; its self-test runs the first time.

    Raises:
        NoKernelError: there is no such kernel, or it cannot run on this machine.
        PluginLoadError: it breaks the hook contract, or failed its self-test (then it is quarantined).
    """
    with _lock:
        candidate = get_registry().find(name)
        bound = _bound.get(name)
        if bound is not None and bound.spec is candidate.spec:
            return bound
        quarantined = _quarantined.get(name)
        if quarantined is not None and quarantined[0] is candidate.spec:
            raise PluginLoadError(quarantined[1])
        # Before any of its code runs: an instruction that the machine lacks would end the process.
        reason = machine_refusal(candidate, this_host(), machine_policy())
        if reason is not None:
            raise NoKernelError(f"kernel {name!r} cannot run here: {reason}")
        bound = BoundKernel(candidate, check_kernel_class(candidate.spec))
        try:
            # Kernels for other devices, or with conditions of their own, are proved by `int8moe verify`.
            if bound.refusal(self_test_config(candidate.spec), this_host()) is None and candidate.spec.device == "cpu":
                bound.layout = self_test(bound)
        except Exception as error:
            reason = str(error) if isinstance(error, Int8MoEError) else f"{type(error).__name__}: {error}"
            message = (
                f"kernel {name!r} of {candidate.distribution} failed its self-test and is quarantined for this "
                f"process: {reason}"
            )
            _quarantined[name] = candidate.spec, message
            logger.error("%s", message)
            raise PluginLoadError(message) from error
        _bound[name] = bound
        return bound


def choose(config: MoEConfig, *, kernel: str | None = None, device: str = "cpu") -> tuple[BoundKernel, SelectionReport]:
    """Select and bind: the best usable kernel that loads, passes its self-test and takes the config.

    Raises:
        NoKernelError: a named kernel is refused, or no candidate is left; with every reason.
        PluginLoadError: a named kernel does not load or fails its self-test.
    """
    policy = policy_from_environment(kernel, device)
    if policy.kernel is not None:
        get_registry().find(policy.kernel)  # an unknown name: say which plugin may have failed to bring it
    host = this_host()
    ranking = rank(config, host, get_registry().candidates(), policy)
    failed: list[Rejection] = []
    for position, candidate in enumerate(ranking.usable):
        name = candidate.spec.name
        try:
            bound = bind(name)
            reason = bound.refusal(config, host)
            if reason is not None and policy.kernel is not None:
                raise NoKernelError(
                    f"kernel {name!r} (named by {policy.pinned_by}) cannot be used: {reason}. "
                    "Name another kernel, or none to let int8moe choose."
                )
        except Exception as error:
            if policy.kernel is not None:
                raise
            reason = str(error) if isinstance(error, Int8MoEError) else f"{type(error).__name__}: {error}"
            failed.append(Rejection(name, candidate.distribution, reason))
            continue
        if reason is not None:
            failed.append(Rejection(name, candidate.distribution, reason))
            continue
        if failed:
            _tell_fallback(failed[0], name)
        return bound, SelectionReport(
            chosen=name,
            rejected=(*failed, *ranking.rejected),
            outranked=tuple(other.spec.name for other in ranking.usable[position + 1 :]),
            pinned=policy.pinned_by,
        )
    rejected = (*failed, *ranking.rejected)
    raise NoKernelError(no_kernel_message(config, rejected, hints()), SelectionReport(chosen="", rejected=rejected))


def _tell_fallback(first: Rejection, chosen: str) -> None:
    if (first.name, chosen) not in _fallbacks_told:
        _fallbacks_told.add((first.name, chosen))
        logger.warning("falling back to %s: %s (%s): %s", chosen, first.name, first.distribution, first.reason)


def select_kernel(
    config: MoEConfig,
    *,
    kernel: str | None = None,
    device: str = "cpu",
    host: HostInfo | None = None,
) -> SelectionReport:
    """Say which kernel would serve ``config``, and why no other.

    Args:
        config: the layer.
        kernel: a kernel's name, which is then used or an error; None = INT8MOE_KERNEL, else the best.
        device: torch device ("cpu", "cuda:0"; only the type counts).
        host: another machine to decide for. Its features alone count then, and nothing is loaded; None = this
            machine, where the choice is bound and self-tested as a layer would.

    Raises:
        NoKernelError: nothing can serve it; the text lists every candidate with its reason.
    """
    if host is None:
        return choose(config, kernel=kernel, device=device)[1]
    policy = policy_from_environment(kernel, device, hypothetical=True)
    ranking = rank(config, host, get_registry().candidates(), policy)
    if not ranking.usable:
        raise NoKernelError(
            no_kernel_message(config, ranking.rejected, hints(host)),
            SelectionReport(chosen="", rejected=ranking.rejected),
        )
    return SelectionReport(
        chosen=ranking.usable[0].spec.name,
        rejected=ranking.rejected,
        outranked=tuple(other.spec.name for other in ranking.usable[1:]),
        pinned=policy.pinned_by,
    )
