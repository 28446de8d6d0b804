"""Loads a chosen kernel, checks its hooks, and lets it prove itself on a known answer before it is used."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pluggy
import torch
from torch.utils._python_dispatch import _disable_current_modes

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
from .self_test import self_test, self_test_configs
from .signatures import check_hooks

logger = logging.getLogger("int8moe.binding")

_lock = threading.RLock()
_bound: dict[str, BoundKernel] = {}
_quarantined: dict[str, tuple[KernelSpec, str]] = {}
_fallbacks_told: set[tuple[str, str]] = set()


def _run_serially_in_child() -> None:
    global _lock
    _lock = threading.RLock()  # the thread that held it may not be there
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
        apply_rows, restore_weights, release_scratch, packed_expert_nbytes, run_peak, read_memory, tune: the
            optional ones, or None.
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
        self.run_peak: Callable[[int], int] | None = getattr(implementation, "run_peak", None)
        self.read_memory: Callable[[torch.Tensor], None] | None = getattr(implementation, "read_memory", None)
        self.tune: Callable[..., dict[str, str]] | None = getattr(implementation, "tune", None)
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


def _plugin_fault(error: BaseException, what: str) -> BaseException:
    """What a kernel's own code raised, SystemExit included, as an error of ours; the user's interrupt stays one."""
    if isinstance(error, KeyboardInterrupt):
        return error
    text = str(error) if isinstance(error, Int8MoEError) else f"{type(error).__name__}: {error}"
    return PluginLoadError(f"{what}: {text}")


@contextlib.contextmanager
def _no_ambient_modes() -> Iterator[None]:
    """Kernels are loaded and tested on real tensors, whatever default device or tracing mode the caller is under."""
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        yield


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
        except BaseException as error:
            raise _plugin_fault(error, f"{owner}: target {spec.target!r} cannot be loaded") from error
    if not inspect.isclass(cls):
        raise PluginLoadError(f"{owner}: target {spec.target!r} is {cls!r}; name a class")
    try:
        implementation: object = cls()
    except BaseException as error:
        raise _plugin_fault(error, f"{owner}: {cls.__qualname__}() failed") from error
    check_hooks(implementation, FusedMoEExperts, required=REQUIRED_HOOKS, owner=owner)
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(FusedMoEExperts)
    try:
        manager.register(implementation)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise PluginLoadError(f"{owner}: {' '.join(str(error).split())}") from None
    return implementation


def bind(name: str, config: MoEConfig | None = None) -> BoundKernel:
    """Load a kernel by name, once per process; its self-test runs the first time.

    Args:
        name: "<namespace>.<kernel>".
        config: what it is wanted for: the self-test falls back to it where the kernel refuses the usual ones.

    Raises:
        NoKernelError: there is no such kernel, or it cannot run on this machine.
        PluginLoadError: it breaks the hook contract, or failed its self-test (then it is quarantined).
    """
    with _lock, _no_ambient_modes():
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
            bound.layout = _self_tested_layout(bound, config)
        except BaseException as error:
            fault = _plugin_fault(
                error,
                f"kernel {name!r} of {candidate.distribution} failed its self-test and is quarantined for this process",
            )
            if not isinstance(fault, PluginLoadError):
                raise
            _quarantined[name] = candidate.spec, str(fault)
            logger.error("%s", fault)
            raise fault from error
        _bound[name] = bound
        return bound


def _self_tested_layout(bound: BoundKernel, config: MoEConfig | None) -> WeightLayout | None:
    """The layout that the kernel's packing makes, once it has given the known answer.

    None where it could not be asked: it refuses every config that is small enough.
    """
    for question in self_test_configs(bound.spec, config):
        if bound.refusal(question, this_host()) is None:
            return self_test(bound, question)
    logger.warning("kernel %r takes none of the self-test's configs: its known answer was not checked", bound.name)
    return None


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
            bound = bind(name, config)
            reason = bound.refusal(config, host)
            if reason is not None and policy.kernel is not None:
                raise NoKernelError(
                    f"kernel {name!r} (named by {policy.pinned_by}) cannot be used: {reason}. "
                    "Name another kernel, or none to let int8moe choose."
                )
        except BaseException as error:
            fault = error if isinstance(error, Int8MoEError) else _plugin_fault(error, f"kernel {name!r}")
            if policy.kernel is not None or not isinstance(fault, Int8MoEError):
                raise fault from (None if fault is error else error)
            failed.append(Rejection(name, candidate.distribution, str(fault)))
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
