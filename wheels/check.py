"""Install built wheels as a user would and see that they work: the core alone, then with each plugin of this machine.

    python wheels/check.py FOLDER --torch torch==2.13.0

Torch and the core are installed once. Each plugin gets an environment of its own that sees them, and holds nothing else
but the plugin. Wheels for another machine are left out, with that reason.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from packaging.tags import sys_tags
from packaging.utils import parse_wheel_filename


class Fault(Exception):
    """What is wrong with a wheel; the text is shown to people."""


class Environment:
    """A fresh virtual environment, used from an empty folder; it also sees what is installed in ``base``."""

    def __init__(self, folder: Path, base: Environment | None = None) -> None:
        venv.create(folder / "venv", with_pip=True)
        self._python, self._empty = folder / "venv" / "bin" / "python", folder / "empty"
        self._empty.mkdir()
        self.packages = Path(self.run("-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip())
        if base is not None:
            (self.packages / "base.pth").write_text(f"{base.packages}\n")

    def run(self, *arguments: str) -> str:
        """Output of the environment's Python; its messages go through."""
        keep = {name: value for name, value in os.environ.items() if not name.startswith(("INT8MOE_", "PYTHON"))}
        done = subprocess.run(
            [str(self._python), *arguments], env=keep, cwd=self._empty, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
        return done.stdout

    def install(self, *what: str | Path) -> None:
        """Install with pip."""
        self.run("-m", "pip", "install", "--quiet", "--disable-pip-version-check", *map(str, what))

    def listed(self) -> dict[str, Any]:
        """What ``int8moe list-kernels`` says; with self-tests of what can run."""
        return dict(json.loads(self.run("-m", "int8moe", "list-kernels", "--check", "--json")))


def check(core: Path, plugins: Iterable[Path], torch: str) -> None:
    """Install the core in a fresh environment, and each plugin with it in one of its own.

    Raises:
        Fault: what is listed is not what a working wheel gives.
        subprocess.CalledProcessError: a command failed, and said why.
    """
    with tempfile.TemporaryDirectory() as folder:
        base = Environment(Path(folder, "core"))
        base.install(torch)
        base.install(core)
        alone = {kernel["name"]: kernel["available"] for kernel in base.listed()["kernels"]}
        if alone != {"reference.torch": True}:
            raise Fault(f"{core.name} alone lists {alone}; reference.torch is wanted, available")
        base.run("-m", "int8moe", "run")
        for number, plugin in enumerate(plugins):
            environment = Environment(Path(folder, str(number)), base)
            environment.install(plugin)
            check_plugin(environment.listed(), plugin)
            print(environment.run("-m", "int8moe", "list-kernels"), end="")
            environment.run("-m", "int8moe", "run")


def check_plugin(listed: dict[str, Any], plugin: Path) -> None:
    """Raise Fault unless the plugin is loaded, and each of its kernels can run or lacks nothing but instructions."""
    distribution = parse_wheel_filename(plugin.name)[0]
    (record,) = [p for p in listed["plugins"] if p["distribution"] == distribution] or [{"state": "not listed"}]
    if record["state"] != "loaded":
        raise Fault(f"{plugin.name} is {record['state']}: {record.get('error')}")
    kernels = [kernel for kernel in listed["kernels"] if kernel["distribution"] == distribution]
    reasons = {kernel["name"]: kernel["reason"] for kernel in kernels if not kernel["available"]}
    broken = {name: reason for name, reason in reasons.items() if "machine is" in reason or ".so" in reason}
    if not kernels or broken:
        raise Fault(f"{plugin.name} lists {broken or 'no kernel'}")


def main() -> int:
    """Check every wheel of a folder; 0 when all work that this machine can run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with wheels of build.py")
    parser.add_argument("--torch", default="torch", metavar="REQUIREMENT", help="what is installed first")
    options = parser.parse_args()
    wheels = sorted(options.folder.resolve().glob("*.whl"))
    by_name = {str(parse_wheel_filename(wheel.name)[0]): wheel for wheel in wheels}
    core = by_name.pop("int8moe", None)
    if core is None:
        print(
            f"check.py: {options.folder} has no wheel of int8moe: run wheels/build.py {options.folder}", file=sys.stderr
        )
        return 1
    here = set(sys_tags())
    usable = {name: wheel for name, wheel in by_name.items() if here & parse_wheel_filename(wheel.name)[3]}
    for name in by_name.keys() - usable.keys():
        print(f"left out {by_name[name].name}: it is for another machine", file=sys.stderr)
    try:
        check(core, usable.values(), options.torch)
    except (Fault, subprocess.CalledProcessError) as error:
        print(f"check.py: {error}", file=sys.stderr)
        return 1
    print(f"ok: {', '.join(wheel.name for wheel in (core, *usable.values()))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
