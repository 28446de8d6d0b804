"""Finds and loads a plugin's shared library, and says why it cannot be used. Imports no torch."""

from __future__ import annotations

import ctypes
import importlib
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..contracts import NUMERICS_VERSION
from . import abi


class LibraryUnavailable(Exception):
    """Why a native library cannot be used; the text is shown to people."""


class NativeLibrary:
    """The shared library of a plugin that is built on the kernel driver's headers; loaded when it is first needed.

    Args:
        package: the plugin's import package, in whose folders the library lies.
        file_name: of the library.
        distribution: what to reinstall.
        machines: values of ``platform.machine()`` that it is built for; () = any.
        functions: functions of the library beyond ``int8moe/abi.h``: name to ctypes' result and argument types.
        compilers: the oldest compilers that build every tier, for the reason of a tier that was left out.
    """

    def __init__(
        self,
        *,
        package: str,
        file_name: str,
        distribution: str,
        machines: tuple[str, ...] = (),
        functions: Mapping[str, tuple[Any, list[Any]]] | None = None,
        compilers: str = "a newer compiler",
    ) -> None:
        self.package, self.file_name, self.distribution, self.machines = package, file_name, distribution, machines
        self.not_built = (
            f"this install was built without it: its compiler was too old; reinstall {distribution} with {compilers}"
        )
        self._functions = {**abi.FUNCTIONS, **(functions or {})}
        self._loaded: ctypes.CDLL | None = None

    @property
    def path(self) -> Path | None:
        """The library beside the package's files; an editable install has it in another folder of ``__path__``."""
        for folder in importlib.import_module(self.package).__path__:
            candidate = Path(folder) / self.file_name
            if candidate.is_file():
                return candidate
        return None

    def load(self) -> ctypes.CDLL:
        """Load it once.

        Raises:
            LibraryUnavailable: another machine, no file, a file that does not load, or one of another version.
        """
        if self._loaded is None:
            self._loaded = self._open()
        return self._loaded

    def _open(self) -> ctypes.CDLL:
        machine = platform.machine()
        if self.machines and machine not in self.machines:
            raise LibraryUnavailable(f"machine is {machine}")
        path = self.path
        if path is None:
            raise LibraryUnavailable(
                f"{self.file_name} is missing: this install was built without native code; "
                f"reinstall {self.distribution}"
            )
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise LibraryUnavailable(f"{self.file_name} does not load: {error}") from None
        self._check_versions(library)
        for name, (result, arguments) in self._functions.items():
            try:
                function = getattr(library, name)
            except AttributeError:
                raise self._stale(f"does not export {name}") from None
            function.restype, function.argtypes = result, arguments
        return library

    def _check_versions(self, library: ctypes.CDLL) -> None:
        try:
            driver, numerics = (getattr(library, name)() for name in abi.VERSIONS)
        except AttributeError as error:
            raise self._stale(f"does not export {str(error).rpartition(' ')[2]}") from None
        if driver != abi.DRIVER_VERSION:
            raise self._stale(f"has driver version {driver}, this int8moe needs {abi.DRIVER_VERSION}")
        if numerics != NUMERICS_VERSION:
            raise self._stale(f"computes numerics version {numerics}, this int8moe has {NUMERICS_VERSION}")

    def _stale(self, what: str) -> LibraryUnavailable:
        return LibraryUnavailable(f"{self.file_name} {what}; reinstall {self.distribution}")

    def built_tiers(self) -> tuple[str, ...]:
        """The tiers that the library holds, in the order of its table."""
        library = self.load()
        return tuple(library.int8moe_tier_name(index).decode() for index in range(library.int8moe_tier_count()))

    def tier_index(self, tier: str) -> int:
        """Position of a tier in the library's table.

        Raises:
            LibraryUnavailable: the library was built without it.
        """
        tiers = self.built_tiers()
        if tier not in tiers:
            raise LibraryUnavailable(f"{self.file_name} has no tier {tier}: {self.not_built}")
        return tiers.index(tier)

    def check(self, status: int, what: str) -> None:
        """Raise when a native call did not return 0.

        Raises:
            MemoryError: scratch could not be had.
            RuntimeError: any other status.
        """
        if status:
            text = self.load().int8moe_status_text(status).decode()
            raise (MemoryError if status == abi.ERROR_MEMORY else RuntimeError)(f"{what}: {text} (status {status})")
