"""Finds plugins, isolates them from each other, and keeps what they declare. Imports no torch.

pluggy validates and calls the provider hook, one PluginManager a provider: with a shared one, one raising
plugin would end the call for all, and a second entry point of the same name would be dropped in silence.
"""

from __future__ import annotations

import inspect
import json
import logging
import threading
import traceback as tracebacks
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pluggy

from . import environment, reference_provider
from .contracts import (
    NUMERICS_VERSION,
    PLUGIN_API_VERSION,
    HostInfo,
    KernelSpec,
)
from .distributions import find_entry_points
from .errors import (
    ConfigError,
    DuplicateKernelError,
    IncompatiblePluginError,
    Int8MoEError,
    NoKernelError,
    PluginLoadError,
)
from .hookspecs import ENTRY_POINT_GROUP, PROJECT, KernelProvider
from .host import this_host
from .near_names import near_names
from .signatures import check_hooks

logger = logging.getLogger("int8moe.registry")

State = Literal["loaded", "blocked", "broken", "incompatible", "duplicate"]
_CORE = "int8moe"


@dataclass(frozen=True)
class PluginRecord:
    """One provider as discovered: where it is from, what became of it, what it declares."""

    name: str
    distribution: str
    version: str
    state: State = "loaded"
    error: str = ""
    traceback: str = ""
    value: str = ""
    kernels: tuple[KernelSpec, ...] = ()
    isa_ladder: tuple[str, ...] = ()

    def failed(self, error: BaseException) -> PluginRecord:
        """The record of a provider whose loading ended in ``error``."""
        state: State = "broken"
        if isinstance(error, IncompatiblePluginError):
            state = "incompatible"
        elif isinstance(error, DuplicateKernelError):
            state = "duplicate"
        kind = type(error).__name__
        text = _safely(lambda: str(error), "")
        if not isinstance(error, Int8MoEError):
            text = f"{kind}: {text}" if text else kind
        trace = _safely(lambda: "".join(tracebacks.format_exception(type(error), error, error.__traceback__)), kind)
        return replace(self, state=state, error=_one_line(text) or kind, traceback=trace, kernels=(), isa_ladder=())


@dataclass(frozen=True)
class Candidate:
    """One declared kernel with what selection needs to know of its plugin."""

    spec: KernelSpec
    distribution: str
    version: str
    isa_ladder: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.spec.name


def _safely(make: Callable[[], str], otherwise: str) -> str:
    """A text that foreign code makes: an exception's ``__str__`` may raise anything itself."""
    try:
        return make()
    except KeyboardInterrupt:
        raise
    except BaseException:
        return otherwise


def _one_line(text: str) -> str:
    return " ".join(text.split())


class Registry:
    """The plugins of one process. Entry points are looked at once, when they are first asked for.

    Attributes:
        on_loading: called with each record before the plugin's code runs, which may end the process.
    """

    def __init__(self) -> None:
        self.on_loading: Callable[[PluginRecord], object] = lambda record: None
        self._lock = threading.RLock()
        self._records: list[PluginRecord] | None = None
        self._loading: list[str] = []

    def plugins(self) -> tuple[PluginRecord, ...]:
        """Every provider, built-in first, then entry points by name, then those registered live."""
        with self._lock:
            if self._loading:
                name = self._loading[-1]
                raise PluginLoadError(
                    f"register_kernels of {name!r} (or the import of its module) asks the registry while it is "
                    "being filled: declare kernels from what the plugin itself knows"
                )
            if self._records is None:
                environment.configure_logging()
                environment.warn_unknown_variables()
                try:
                    self._records = list(_discover(self._loading, self.on_loading))
                finally:
                    self._loading.clear()
            return tuple(self._records)

    def candidates(self) -> tuple[Candidate, ...]:
        """Every kernel of every loaded provider, by name."""
        found = [
            Candidate(spec, record.distribution, record.version, record.isa_ladder)
            for record in self.plugins()
            if record.state == "loaded"
            for spec in record.kernels
        ]
        return tuple(sorted(found, key=lambda candidate: candidate.spec.name))

    def find(self, name: str) -> Candidate:
        """The kernel of that name; NoKernelError with near names where there is none."""
        candidates = self.candidates()
        for candidate in candidates:
            if candidate.spec.name == name:
                return candidate
        raise NoKernelError(unknown_kernel(name, candidates, self.plugins()))

    def register(self, provider: object) -> tuple[KernelSpec, ...]:
        """Add a live provider (a module or an instance). See :func:`register_kernel`."""
        with self._lock:
            specs, ladder = load_provider(provider, namespace=None)
            if not specs:
                raise PluginLoadError(f"{provider!r}: register_kernels() returned no KernelSpec")
            namespace = specs[0].namespace
            record = PluginRecord(
                namespace, "(registered live)", "", kernels=specs, isa_ladder=ladder, value=repr(provider)
            )
            existing = self.plugins()
            _refuse_clash(record, [r for r in existing if r.state == "loaded"])
            assert self._records is not None
            self._records.append(record)
            return specs

    def unregister(self, namespace: str) -> None:
        """Forget a provider that was registered live."""
        with self._lock:
            self._records = [
                record
                for record in self.plugins()
                if not (record.name == namespace and record.distribution == "(registered live)")
            ]


def unknown_kernel(name: str, candidates: Iterable[Candidate], plugins: Iterable[PluginRecord] = ()) -> str:
    """The text for a kernel name that nobody declares: near names, what exists, and a plugin that failed."""
    known = [candidate.spec.name for candidate in candidates]
    near = near_names(name, known, count=3, cutoff=0.4)
    message = f"no kernel is called {name!r}"
    message += f"; did you mean {' or '.join(near)}?" if near else "."
    message += f" Registered: {', '.join(known)}."
    for record in plugins:
        if record.state != "loaded" and name.partition(".")[0] == record.name:
            message += f" Plugin {record.name!r} ({record.distribution}) is {record.state}: {record.error}."
    return f"{message} Run `int8moe list-kernels` for the whole list."


def load_provider(provider: object, namespace: str | None) -> tuple[tuple[KernelSpec, ...], tuple[str, ...]]:
    """Validate a provider, call its hook, and check what it returns.

    Args:
        provider: a module or an instance with ``register_kernels``.
        namespace: the entry point's name, which every kernel name must begin with; None = take it from the
            kernels, which must agree.
    """
    if inspect.isclass(provider):
        raise PluginLoadError(
            f"the provider is the class {provider.__qualname__}: name a module or an instance "
            f"({provider.__qualname__}())"
        )
    check_hooks(provider, KernelProvider, required=("register_kernels",), owner=_describe(provider))
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(KernelProvider)
    try:
        manager.register(provider)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise PluginLoadError(_one_line(str(error))) from None
    answers: list[Any] = manager.hook.register_kernels()
    if len(answers) != 1 or not isinstance(answers[0], (list, tuple)):
        raise PluginLoadError(
            f"register_kernels() returned {answers[0] if answers else None!r}: return a list of KernelSpec"
        )
    specs = tuple(answers[0])
    seen: set[str] = set()
    for spec in specs:
        if not isinstance(spec, KernelSpec):
            raise PluginLoadError(f"register_kernels() returned {spec!r} in its list: return KernelSpec objects")
        namespace = namespace or spec.namespace
        if spec.namespace != namespace:
            raise PluginLoadError(
                f"kernel {spec.name!r} is outside the namespace {namespace!r}: call it {namespace}.{spec.short_name}"
            )
        if spec.name in seen:
            raise DuplicateKernelError(f"kernel {spec.name!r} is declared twice by the same provider")
        seen.add(spec.name)
        if spec.api_version != PLUGIN_API_VERSION:
            raise IncompatiblePluginError(
                f"kernel {spec.name!r} was written for plugin API {spec.api_version}, this core has "
                f"{PLUGIN_API_VERSION}: install a matching release"
            )
        if spec.numerics.version != NUMERICS_VERSION:
            raise IncompatiblePluginError(
                f"kernel {spec.name!r} declares numerics version {spec.numerics.version}, this core has "
                f"{NUMERICS_VERSION}: install a matching release"
            )
    ladder = getattr(provider, "isa_ladder", ())
    if not isinstance(ladder, (list, tuple)) or not all(isinstance(rung, str) for rung in ladder):
        raise PluginLoadError(f"isa_ladder is {ladder!r}: give a tuple of kernel short names, weakest first")
    return specs, tuple(ladder)


def _describe(provider: object) -> str:
    return f"module {provider.__name__}" if isinstance(provider, ModuleType) else type(provider).__qualname__


def _refuse_clash(record: PluginRecord, loaded: Iterable[PluginRecord]) -> None:
    for other in loaded:
        if other.name == record.name:
            raise DuplicateKernelError(
                f"the namespace {record.name!r} is claimed by {other.distribution} {other.version} ({other.value}) "
                f"and by {record.distribution} {record.version} ({record.value}): uninstall one of them"
            )


def _discover(loading: list[str], tell: Callable[[PluginRecord], object]) -> Iterator[PluginRecord]:
    """Built-in provider, then every entry point, each in isolation; ``loading`` names the one whose code runs."""
    strict = environment.flag("INT8MOE_STRICT")
    specs, ladder = load_provider(reference_provider, "reference")
    loaded = [PluginRecord("reference", _CORE, _version(_CORE), value=reference_provider.__name__, kernels=specs)]
    yield loaded[0]
    allowed = environment.names("INT8MOE_PLUGINS")
    blocked = environment.names("INT8MOE_DISABLE_PLUGINS") or frozenset()
    points = sorted(_entry_points(), key=lambda item: (item[0].name, item[0].distribution, item[0].value))
    faults = environment.absent_plugins({"reference"} | {record.name for record, _ in points})
    if "INT8MOE_PLUGINS" in faults:
        raise ConfigError(faults["INT8MOE_PLUGINS"])
    for text in faults.values():
        logger.warning("%s", text)
    seen: set[tuple[str, str]] = set()
    for record, point in points:
        if record.name in blocked:
            yield replace(record, state="blocked", error="named in INT8MOE_DISABLE_PLUGINS")
            continue
        if allowed is not None and record.name not in allowed:
            yield replace(record, state="blocked", error="not named in INT8MOE_PLUGINS")
            continue
        if (record.name, record.value) in seen:
            yield replace(
                record, state="duplicate", error=f"the same entry point ({record.value}) was found already: ignored"
            )
            continue
        seen.add((record.name, record.value))
        loading.append(record.name)
        tell(record)
        try:
            if isinstance(point, Exception):
                raise point
            _refuse_clash(record, loaded)
            specs, ladder = load_provider(point.load(), record.name)
            record = replace(record, kernels=specs, isa_ladder=ladder)
            loaded.append(record)
        # A plugin may end in anything, SystemExit included; only the user's own interrupt is let through.
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            record = record.failed(error)
            if strict:
                raise PluginLoadError(
                    f"plugin {record.name!r} of {record.distribution} {record.version} is {record.state}: "
                    f"{record.error} (INT8MOE_STRICT is set)"
                ) from error
            logger.debug("plugin %r:\n%s", record.name, record.traceback)
            logger.warning(
                "plugin %r of %s %s is %s: %s",
                record.name, record.distribution, record.version, record.state, record.error,
            )  # fmt: skip
        finally:
            loading.clear()
        yield record


def _entry_points() -> Iterator[tuple[PluginRecord, metadata.EntryPoint | PluginLoadError]]:
    """A record for each entry point; for a distribution whose entry points cannot be read, one with its error."""
    for distribution, version, point, error in find_entry_points(ENTRY_POINT_GROUP):
        if point is not None:
            yield PluginRecord(point.name, distribution, version, value=point.value), point
        else:
            damaged = PluginLoadError(f"its entry_points.txt cannot be read ({error}): install it again")
            yield PluginRecord(distribution, distribution, version), damaged


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:  # run from a source tree without an installation
        return "0+unknown"


_registry = Registry()


def get_registry() -> Registry:
    """The registry of this process."""
    return _registry


def register_kernel(provider: object) -> tuple[KernelSpec, ...]:
    """Register a provider of this process, as an entry point would, and check its kernels at once.

    Args:
        provider: a module or an instance with a ``register_kernels`` hook implementation. A KernelSpec's target
            may be the class itself.

    Returns:
        The specs that it declared.

    Raises:
        PluginLoadError: the provider or one of its kernel classes breaks the hook contract.
        DuplicateKernelError: the namespace is taken.
        IncompatiblePluginError: written for another API or numerics version.
    """
    specs = _registry.register(provider)
    from .binding import check_kernel_class  # imports torch only if a kernel class does

    try:
        for spec in specs:
            if spec.unavailable is None:
                check_kernel_class(spec)
    except BaseException:
        _registry.unregister(specs[0].namespace)
        raise
    return specs


def hint_table() -> list[dict[str, Any]]:
    """The distributions of hints.json, this project's own: machines, distribution, source and what each serves.

    One without machines is for a device, which no word of the machine shows.
    """
    table: list[dict[str, Any]] = json.loads(Path(__file__).with_name("hints.json").read_text(encoding="utf-8"))
    return table


def hints(host: HostInfo | None = None) -> list[str]:
    """Which distributions would serve this machine and are not installed, one line each."""
    host = host or this_host()
    installed = {record.distribution.lower().replace("_", "-") for record in _registry.plugins()}
    return [
        f"this machine is {host.machine}: {row['distribution']} has kernels for {row['serves']} "
        f"(from a checkout: pip install ./{row['source']})"
        for row in hint_table()
        if host.machine in row["machines"] and row["distribution"] not in installed
    ]
