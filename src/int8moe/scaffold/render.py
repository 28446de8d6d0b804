"""The templates, filled in."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.version import Version

from .. import get_include
from ..contracts import NUMERICS_VERSION, PLUGIN_API_VERSION
from ..errors import ConfigError
from ..host import feature_words
from ..native.abi import DRIVER_VERSION
from .names import ANY_ISA, PluginNames

_TEMPLATES = Path(__file__).with_name("templates")
_SUFFIX = ".in"
# What stands for names in a template's path.
_PACKAGE, _SHORT_NAME = "PACKAGE", "SHORT_NAME"


# Not $NAME, which CMake and shells write themselves.
_PLACEHOLDER = re.compile(r"@([A-Z_]+)@")


def render(names: PluginNames) -> dict[Path, bytes]:
    """Every file of a new plugin: its path below the distribution's folder, and its bytes."""
    values = _values(names)
    files: dict[Path, bytes] = {}
    for kind in ("plugin", "native" if names.native else "torch"):
        for source in _files_below(_TEMPLATES / kind):
            path = str(source.relative_to(_TEMPLATES / kind))
            target = Path(path.replace(_PACKAGE, names.package).replace(_SHORT_NAME, names.short_name))
            data = source.read_bytes()
            if source.suffix == _SUFFIX:
                data = _PLACEHOLDER.sub(lambda found: values[found[1]], data.decode("utf-8")).encode("utf-8")
                target = target.with_suffix("")
            files[target] = data
    if names.native:
        headers = Path(get_include())
        for header in _files_below(headers):
            files["include" / header.relative_to(headers)] = header.read_bytes()
    return dict(sorted(files.items()))


def _files_below(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and "__pycache__" not in path.parts)


def _values(names: PluginNames) -> dict[str, str]:
    any_isa = names.isa == ANY_ISA
    at_home = not any_isa and names.isa in feature_words()
    return {
        "NAMESPACE": names.namespace,
        "PACKAGE": names.package,
        "DISTRIBUTION": names.distribution,
        "KERNEL": names.kernel,
        "SHORT_NAME": names.short_name,
        "CLASS": names.class_stem,
        "LAYOUT": names.layout,
        "NEEDS": "any machine" if any_isa else f"a CPU with {names.isa}",
        "ISA": "()" if any_isa else f'(("{names.isa}",),)',
        "MACHINES": f'("{platform.machine()}",)' if at_home else "()",
        "MACHINES_PATTERN": f"^({platform.machine()})$" if at_home else ".",
        "REQUIREMENT": _requirement(),
        "API_VERSION": str(PLUGIN_API_VERSION),
        "NUMERICS_VERSION": str(NUMERICS_VERSION),
        "DRIVER_VERSION": str(DRIVER_VERSION),
    }


def _requirement() -> str:
    """The releases of int8moe that the plugin can expect to fit it: this one and later compatible ones."""
    try:
        version = Version(metadata.version("int8moe"))
    except metadata.PackageNotFoundError:
        raise ConfigError(
            "int8moe runs from a source tree that is not installed, and a plugin has to require some release of it: "
            "install it first (pip install -e CHECKOUT)"
        ) from None
    if version.major == 0:
        return f"int8moe>=0.{version.minor},<0.{version.minor + 1}"
    return f"int8moe>={version.major}.{version.minor},<{version.major + 1}"
