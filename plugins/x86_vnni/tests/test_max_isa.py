"""INT8MOE_MAX_ISA caps the tier, so that one machine can test every tier that it has, as a user would meet it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

PROGRAM = """
import json, sys
import int8moe
layer = int8moe.FusedMoE(int8moe.MoEConfig(num_experts=4, top_k=2, hidden_size=64, intermediate_size=64))
print(json.dumps([layer.kernel.name, str(layer.selection)]))
"""


def run(*command: str, cap: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "INT8MOE_MAX_ISA": cap}
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=False)


def test_the_capped_tier_is_chosen_and_passes_the_suite(tier: str):
    chosen = run("-c", PROGRAM, cap=tier)
    assert chosen.returncode == 0, chosen.stderr
    name, selection = json.loads(chosen.stdout)
    assert name == f"x86_vnni.{tier}", selection
    suite = run("-m", "int8moe.testing", name, "--grid", "reduced", cap=tier)
    assert suite.returncode == 0, suite.stdout + suite.stderr
