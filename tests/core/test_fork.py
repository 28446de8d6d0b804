"""A forked child: serial where the parent had threads, parallel where it had none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from int8moe import list_kernels

CODE = """
import os, sys, torch, int8moe
threads_first = {threads_first}
torch.set_num_threads(2)
layer = int8moe.FusedMoE(
    int8moe.MoEConfig(num_experts=4, top_k=2, hidden_size=256, intermediate_size=128), kernel={kernel!r})
names = ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale")
one = torch.ones(4, 256, 256, dtype=torch.int8), torch.ones(4, 256), torch.ones(4, 256, 128, dtype=torch.int8)
layer.load_weights(**dict(zip(names, (*one, torch.ones(4, 256)))))
layer.process_weights_after_loading()
call = torch.ones(64, 256), torch.ones(64, 2), torch.zeros(64, 2, dtype=torch.int32)
before = layer(*call) if threads_first else None
if threads_first:
    torch.ones(1 << 22).sum()
alone = len(os.listdir("/proc/self/task")) == 1
child = os.fork()
if child == 0:
    after = layer(*call)
    wanted = 2 if alone else 1
    os._exit(0 if torch.get_num_threads() == wanted and (before is None or torch.equal(before, after)) else 3)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
assert torch.get_num_threads() == 2
print("alone" if alone else "with threads")
"""

KERNELS = [kernel.name for kernel in list_kernels() if kernel.available and kernel.device == "cpu"]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in Linux's procfs")
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("threads_first", [True, False])
def test_a_forked_child_finishes(isolated: Callable[..., Any], kernel: str, threads_first: bool) -> None:
    done = isolated(CODE.format(kernel=kernel, threads_first=threads_first))
    assert done.returncode == 0, done.stderr
    if threads_first:
        assert done.stdout.strip() == "with threads"
