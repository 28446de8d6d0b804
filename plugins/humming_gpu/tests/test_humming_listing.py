"""What the kernel is listed with on machines and in environments that are not here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from int8moe.contracts import HostInfo, MoEConfig
from int8moe.registry import Candidate
from int8moe.selection import Policy, rank
from int8moe_humming_gpu import plugin, probe
from int8moe_humming_gpu.probe import Facts

ALL = Facts(nvidia=True, torch_cuda=True, humming="0.1.20")

EXPECTED = [
    (ALL, None),
    (ALL._replace(humming="0.1.31"), None),
    (Facts(), "no GPU: the system shows no NVIDIA device"),
    (ALL._replace(torch_cuda=False), "torch is not a build for CUDA"),
    (ALL._replace(humming=None), "humming-kernels is not installed: pip install 'humming-kernels[cu12]>=0.1.20,<0.2'"),
    (ALL._replace(humming="0.1.19"), "humming-kernels is 0.1.19: pip install"),
    (ALL._replace(humming="0.2.0"), "humming-kernels is 0.2.0: pip install"),
    (ALL._replace(humming="unknown"), "humming-kernels is unknown: pip install"),
]


@pytest.mark.parametrize(("facts", "expected"), EXPECTED)
def test_the_kernel_is_listed_with_the_reason(monkeypatch, facts: Facts, expected: str | None) -> None:
    monkeypatch.setattr(probe, "read_facts", lambda: facts)
    (spec,) = plugin.register_kernels()
    assert (spec.name, spec.numerics.kind) == ("humming_gpu.grouped_gemm", "tolerance")
    assert "rounded to bf16 or fp16" in spec.numerics.reason
    if expected is None:
        assert spec.unavailable is None
    else:
        assert expected in (spec.unavailable or "")


@pytest.mark.parametrize(("named", "usable"), [(None, []), ("humming_gpu.grouped_gemm", ["humming_gpu.grouped_gemm"])])
def test_it_serves_only_when_it_is_named(monkeypatch, named: str | None, usable: list[str]) -> None:
    monkeypatch.setattr(probe, "read_facts", lambda: ALL)
    config = MoEConfig(num_experts=4, top_k=2, hidden_size=128, intermediate_size=128)
    candidates = [Candidate(spec, "test", "1") for spec in plugin.register_kernels()]
    policy = Policy(device="cuda", kernel=named, pinned_by="kernel=" if named else None)
    found = rank(config, HostInfo(machine="x86_64", system="Linux"), candidates, policy)
    assert [candidate.spec.name for candidate in found.usable] == usable


def test_device_files(tmp_path: Path) -> None:
    assert not probe.read_facts(dev=tmp_path).nvidia
    (tmp_path / "nvidiactl").touch()
    assert not probe.read_facts(dev=tmp_path).nvidia
    (tmp_path / "nvidia1").touch()
    assert probe.read_facts(dev=tmp_path).nvidia


def test_listing_imports_neither_torch_nor_the_package() -> None:
    code = (
        "import sys; from int8moe_humming_gpu import plugin; plugin.register_kernels(); "
        "sys.exit(bool({'torch', 'humming'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
