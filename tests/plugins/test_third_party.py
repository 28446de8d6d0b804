"""A third party's distribution for an invented ISA: built, installed, found, used, verified, uninstalled.

Nothing below ``src/int8moe`` knows of it: the machine that has the feature is faked on the plugin's side only.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from virtual_environment import Environment

PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "int8moe-hal9000"
version = "3.1"
dependencies = ["int8moe"]

[project.entry-points."int8moe.kernels"]
hal9000 = "int8moe_hal9000.plugin"

[tool.hatch.build.targets.wheel]
packages = ["int8moe_hal9000"]
"""

PLUGIN = '''
"""Kernels for the HAL 9000. Imports no torch."""

import os

from int8moe import KernelSpec, Numerics, hookimpl

isa_ladder = ("logic", "heuristic")
HERE = os.environ.get("HAL9000") == "1"  # stands for a probe of the machine


@hookimpl
def register_kernels():
    common = dict(device="cpu", schemes=("w8a8",), activations=("silu", "gelu", "gelu_tanh", "swigluoai"),
                  dtypes=("bfloat16", "float16", "float32"), features=("bias", "expert_map"),
                  numerics=Numerics.bitwise(), unavailable=None if HERE else "machine is no HAL 9000")
    return [
        KernelSpec(name="hal9000.logic", target="int8moe_hal9000.experts:Logic", layout="i8_reversed", priority=70, **common),
        KernelSpec(name="hal9000.heuristic", target="int8moe_hal9000.experts:Logic", layout="i8_reversed", priority=75,
                   isa=(("heuristically_programmed",),), **common),
    ]
'''

EXPERTS = '''
"""A kernel with a packing of its own: the columns of every weight reversed."""

from int8moe import WeightLayout, hookimpl
from int8moe.reference import ReferenceExperts


class _View:
    """The layer with its weights turned round again, for the reference to read."""

    def __init__(self, layer):
        self._layer = layer
        self.w13_weight = layer.w13_weight.flip(-1)
        self.w2_weight = layer.w2_weight.flip(-1)

    def __getattr__(self, name):
        return getattr(self._layer, name)


class Logic:
    @hookimpl
    def process_weights_after_loading(self, layer):
        for name in ("w13_weight", "w2_weight"):
            weight = getattr(layer, name)
            weight.copy_(weight.flip(-1))
        return WeightLayout(namespace="hal9000", name="i8_reversed", version=1)

    @hookimpl
    def restore_weights(self, layer):
        for name in ("w13_weight", "w2_weight"):
            weight = getattr(layer, name)
            weight.copy_(weight.flip(-1))

    @hookimpl
    def apply(self, layer, hidden_states, topk_weights, topk_ids, out):
        ReferenceExperts().apply(_View(layer), hidden_states, topk_weights, topk_ids, out)
'''

USE = """
import json, torch, int8moe
config = int8moe.MoEConfig(num_experts=4, top_k=2, hidden_size=48, intermediate_size=20)
layer = int8moe.FusedMoE(config)
names = ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale")
tensors = dict(zip(names, int8moe.quantize_experts(torch.randn(4, 40, 48), torch.randn(4, 48, 20))))
layer.load_weights(**tensors)
layer.process_weights_after_loading()
x, w, ids = torch.randn(5, 48), torch.rand(5, 2), torch.randint(0, 4, (5, 2))
expected = int8moe.reference.fused_experts(x, topk_weights=w, topk_ids=ids, **tensors)
print(json.dumps([layer.kernel.name, layer.weight_layout.tag, torch.equal(layer(x, w, ids), expected)]))
"""


def write(folder: Path, experts: str = EXPERTS) -> Path:
    package = folder / "int8moe_hal9000"
    package.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PYPROJECT)
    (package / "__init__.py").write_text("")
    (package / "plugin.py").write_text(PLUGIN)
    (package / "experts.py").write_text(experts)
    return folder


def kernels(environment: Environment, **env: str) -> dict[str, Any]:
    return {row["name"]: row for row in environment.int8moe("list-kernels", **env)["kernels"]}


@pytest.mark.slow
def test_the_life_of_a_third_party_distribution(tmp_path: Path) -> None:
    environment = Environment(tmp_path / "venv")
    assert "hal9000.logic" not in kernels(environment)

    environment.pip("install", "--no-deps", "--no-build-isolation", str(write(tmp_path / "source")))
    here = kernels(environment, HAL9000="1")
    assert here["hal9000.logic"] | {"isa": None} == {
        "name": "hal9000.logic", "distribution": "int8moe-hal9000", "version": "3.1", "device": "cpu", "isa": None,
        "available": True, "reason": "", "layout": "i8_reversed", "numerics": "bitwise", "priority": 70,
    }  # fmt: skip
    assert "heuristically_programmed" in here["hal9000.heuristic"]["reason"]
    elsewhere = kernels(environment)["hal9000.logic"]
    assert (elsewhere["available"], elsewhere["reason"]) == (False, "machine is no HAL 9000")

    config = json.dumps({"num_experts": 4, "top_k": 2, "hidden_size": 48, "intermediate_size": 20})
    why = environment.int8moe("explain", "--config", config, HAL9000="1")
    assert why["chosen"] == "hal9000.logic"
    used = environment.run("-c", USE, HAL9000="1")
    assert used.returncode == 0, used.stderr
    assert json.loads(used.stdout) == ["hal9000.logic", "hal9000:i8_reversed:1:1", True]

    verified = environment.int8moe(
        "verify",
        "hal9000.logic",
        "--quick",
        *(f"--group={g}" for g in ("declaration", "packing", "integers", "bits", "refusals")),
        HAL9000="1",
    )
    assert sum(group["failed"] for group in verified["groups"]) == 0
    assert sum(group["passed"] for group in verified["groups"]) > 50

    environment.pip("uninstall", "-y", "int8moe-hal9000")
    assert "hal9000.logic" not in kernels(environment, HAL9000="1")


WRONG = {
    "without_the_pack_hook": (
        EXPERTS.replace("    @hookimpl\n    def process_weights_after_loading", "    def pack_it"),
        "process_weights_after_loading",
    ),
    "reordered_arguments": (
        EXPERTS.replace("hidden_states, topk_weights, topk_ids, out):", "hidden_states, topk_ids, topk_weights, out):"),
        "apply(self, layer, hidden_states, topk_weights, topk_ids, out)",
    ),
    "one_bit_off": (
        EXPERTS + "        out.view(__import__('torch').int16)[0, 0] ^= 1\n",
        "quarantined",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_kernel_is_named_and_the_rest_works(tmp_path: Path, plugins: Any, kind: str) -> None:
    experts, word = WRONG[kind]
    source = write(plugins.folder / "source", experts)
    (source / "int8moe_hal9000").rename(plugins.folder / "int8moe_hal9000")
    plugins.add("int8moe-hal9000", {"hal9000": "int8moe_hal9000.plugin"})
    found = plugins.json(
        """
        import json
        from int8moe import MoEConfig, select_kernel
        report = select_kernel(MoEConfig(num_experts=4, top_k=2, hidden_size=48, intermediate_size=20))
        print(json.dumps([report.chosen, {name: reason for name, _, reason in report.rejected}]))
        """,
        HAL9000="1",
    )
    chosen, rejected = found
    assert not chosen.startswith("hal9000")
    assert word in rejected["hal9000.logic"]
    check = plugins.run(
        "import sys; sys.argv[1:] = ['list-kernels', '--check']; from int8moe.cli import main; sys.exit(main())",
        HAL9000="1",
    )
    assert check.returncode == 1
    assert "hal9000.logic" in check.stdout + check.stderr
    assert "Traceback" not in check.stderr
