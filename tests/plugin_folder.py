"""A folder that looks like a site-packages, with plugin distributions written by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

PROVIDER = """
from int8moe import KernelSpec, Numerics, hookimpl

@hookimpl
def register_kernels():
    return [KernelSpec(name="{namespace}.fast", target="{module}_experts:FastExperts", device="cpu", isa={isa},
        schemes=("w8a8",), activations=("silu", "gelu", "gelu_tanh", "swigluoai"),
        dtypes=("bfloat16", "float16", "float32"), features=("bias", "expert_map"), layout="canonical",
        numerics=Numerics.bitwise(), priority=50)]
"""

EXPERTS = """
from int8moe import WeightLayout, hookimpl
from int8moe.reference import ReferenceExperts

class FastExperts:
    @hookimpl
    def process_weights_after_loading(self, layer):
        return WeightLayout.canonical()

    @hookimpl
    def apply(self, layer, hidden_states, topk_weights, topk_ids, out):
        ReferenceExperts().apply(layer, hidden_states, topk_weights, topk_ids, out)
"""


class PluginFolder:
    """A folder that looks like a site-packages with distributions in it, for subprocesses."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(
        self,
        distribution: str,
        entry_points: dict[str, str],
        modules: dict[str, str] | None = None,
        version: str = "1.0",
    ) -> None:
        """Write a distribution by hand, as an installer leaves it."""
        info = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        lines = [f"{name} = {value}" for name, value in entry_points.items()]
        (info / "entry_points.txt").write_text("\n".join(["[int8moe.kernels]", *lines]) + "\n")
        for name, text in (modules or {}).items():
            (self.folder / f"{name}.py").write_text(textwrap.dedent(text))

    def add_good(self, namespace: str = "acme", isa: str = "()") -> None:
        """A kernel that works, under ``<namespace>.fast``."""
        module = f"{namespace}_plugin"
        self.add(
            f"{namespace}-kernels",
            {namespace: module},
            {
                module: PROVIDER.format(namespace=namespace, module=module, isa=isa),
                f"{module}_experts": EXPERTS,
            },
        )

    def run(self, code: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run Python code in a process that sees these distributions."""
        path = os.pathsep.join(filter(None, [str(self.folder), os.environ.get("PYTHONPATH")]))
        clean = {k: v for k, v in os.environ.items() if not k.startswith("INT8MOE_")}
        return subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            env={**clean, "PYTHONPATH": path, **env},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def json(self, code: str, **env: str) -> Any:
        """The JSON document that the code prints."""
        done = self.run(code, **env)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)
