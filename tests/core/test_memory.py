"""Loading and packing does not double memory: at most 1.1 experts + 16 MiB above the weights themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from int8moe import list_kernels

CODE = """
import torch, int8moe

def status(word):
    for line in open("/proc/self/status"):
        if line.startswith(word + ":"):
            return int(line.split()[1]) * 1024

kernel, experts, hidden, inner = {kernel!r}, {experts}, {hidden}, {inner}
config = int8moe.MoEConfig(num_experts=experts, top_k=1, hidden_size=hidden, intermediate_size=inner)
one = dict(w13_weight=torch.ones(2 * inner, hidden, dtype=torch.int8), w13_weight_scale=torch.ones(2 * inner),
           w2_weight=torch.ones(hidden, inner, dtype=torch.int8), w2_weight_scale=torch.ones(hidden))
small = int8moe.FusedMoE(config, kernel=kernel)          # warm: code, self-test
small.load_expert_weights(0, **one); small.reset()
open("/proc/self/clear_refs", "w").write("5")            # the peak counts from here
before = status("VmRSS")
layer = int8moe.FusedMoE(config, kernel=kernel)
for expert in range(experts):
    layer.load_expert_weights(expert, **one)
layer.process_weights_after_loading()
peak = status("VmHWM") - before
stored = sum(t.untyped_storage().nbytes() for t in layer.buffers() if t is not None)
expert_bytes = 3 * hidden * inner
allowed = 1.1 * expert_bytes + 16 * 2**20
assert peak - stored <= allowed, f"extra {{(peak - stored) / 2**20:.1f}} MiB, allowed {{allowed / 2**20:.1f}} MiB"
nbytes = layer.weight_layout.nbytes or experts * expert_bytes
assert nbytes >= experts * expert_bytes
if hidden % 64 == 0 and inner % 64 == 0:
    assert nbytes == experts * expert_bytes              # shapes on the grid do not grow
"""

KERNELS = [kernel.name for kernel in list_kernels() if kernel.available and kernel.device == "cpu"]


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the peak of a process is read from Linux's procfs"
)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("hidden", "inner"), [(4096, 2048), (4001, 2047)])
def test_load_and_pack_stay_within_the_bound(
    isolated: Callable[..., Any], kernel: str, hidden: int, inner: int
) -> None:
    done = isolated(CODE.format(kernel=kernel, experts=6, hidden=hidden, inner=inner))
    assert done.returncode == 0, done.stderr
