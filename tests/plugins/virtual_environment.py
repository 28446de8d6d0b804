"""A virtual environment to install plugins into, for tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any


class Environment:
    """A virtual environment that sees the packages of the one that runs the tests."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=True)
        self.python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
        # The parent's packages, editable installs included, come last on the path.
        outer = [path for path in sys.path if path and Path(path).is_dir() and path != sysconfig.get_path("stdlib")]
        site = self.run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip()
        lines = [f"import site; site.addsitedir({path!r})" for path in outer if "site-packages" in path]
        lines += [path for path in outer if "site-packages" not in path and "lib-dynload" not in path]
        Path(site, "parent.pth").write_text("\n".join(lines) + "\n")

    def run(self, *arguments: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("INT8MOE_")}
        return subprocess.run(
            [str(self.python), *arguments],
            cwd=cwd,
            env={**clean, **env},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )

    def pip(self, *arguments: str) -> None:
        done = self.run("-m", "pip", "--disable-pip-version-check", "-q", *arguments)
        assert done.returncode == 0, done.stderr

    def int8moe(self, *arguments: str, code: int = 0, **env: str) -> Any:
        done = self.run("-m", "int8moe.cli", *arguments, "--json", **env)
        assert done.returncode == code, (done.stdout, done.stderr)
        return json.loads(done.stdout)
