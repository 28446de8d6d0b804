"""What the kernel is listed with on machines and in environments that are not here. Needs no triton."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from int8moe import reference_provider
from int8moe.contracts import HostInfo, MoEConfig
from int8moe.errors import NoKernelError
from int8moe.registry import Candidate
from int8moe.selection import Policy, rank
from int8moe_triton_gpu import plugin, probe
from int8moe_triton_gpu.probe import Facts, refusal

NVIDIA = Facts(nvidia=True, torch_build="cuda", triton="3.9.0")
AMD = Facts(amd=True, torch_build="hip", triton="3.6.0")
HOST = HostInfo(machine="x86_64", system="Linux")
CONFIG = MoEConfig(num_experts=4, top_k=2, hidden_size=64, intermediate_size=32)

# facts: part of the reason; None = usable
EXPECTED = [
    (NVIDIA, None),
    (AMD, None),
    (Facts(), "no GPU: the system shows no NVIDIA device"),
    (Facts(triton="3.9.0", torch_build="cuda"), "no GPU: the system shows no NVIDIA device"),
    (NVIDIA._replace(triton=None), "triton is not installed: install torch 2.10 or newer, built for CUDA"),
    (AMD._replace(triton=None), "triton is not installed: install torch 2.10 or newer, built for ROCm"),
    (NVIDIA._replace(triton="3.5.1"), "triton 3.5.1 is too old, 3.6 or newer is needed: install torch 2.10 or newer"),
    (AMD._replace(triton="3.5.1+rocm6.4"), "triton 3.5.1+rocm6.4 is too old"),
    (NVIDIA._replace(triton="3.10.0"), None),
    (NVIDIA._replace(triton="3.7.0+git1234"), None),
    (NVIDIA._replace(triton=""), "does not say which version it is"),
    (NVIDIA._replace(torch_build=None), "from NVIDIA, but torch is a build for CPUs alone: install torch's CUDA build"),
    (NVIDIA._replace(torch_build="hip"), "from NVIDIA, but torch is a build for ROCm"),
    (AMD._replace(torch_build="cuda"), "from AMD, but torch is a build for CUDA: install torch's ROCm build"),
    (Facts(nvidia=True, amd=True, torch_build="hip", triton="3.9.0"), None),
    (Facts(interpreted=True, triton="3.9.0"), None),
    (Facts(interpreted=True), "triton is not installed: pip install -U 'triton>=3.6'"),
    (
        Facts(interpreted=True, triton="3.4.0"),
        "triton 3.4.0 is too old, 3.6 or newer is needed: pip install -U 'triton>=",
    ),
]


@pytest.mark.parametrize(("facts", "expected"), EXPECTED)
def test_the_kernel_is_listed_with_the_reason(monkeypatch, facts: Facts, expected: str | None) -> None:
    monkeypatch.setattr(probe, "read_facts", lambda: facts)
    (spec,) = plugin.register_kernels()
    assert spec.name == "triton_gpu.grouped_gemm"
    if expected is None:
        assert spec.unavailable is None
    else:
        assert spec.unavailable is not None
        assert expected in spec.unavailable


def test_the_three_reasons_differ() -> None:
    reasons = {refusal(NVIDIA._replace(triton=None)), refusal(NVIDIA._replace(triton="3.5.0")), refusal(Facts())}
    assert len(reasons) == 3
    assert None not in reasons


@pytest.mark.parametrize("facts", [facts for facts, expected in EXPECTED if expected is not None])
def test_every_reason_says_what_to_do(facts: Facts) -> None:
    """And never to put another triton below a torch that brings its own: pip would write over the ROCm build's files."""
    said = refusal(facts) or ""
    assert "install" in said.replace("installed", "")
    assert facts.torch_build is None or "pip install" not in said


def ranking(monkeypatch, facts: Facts, **policy):
    monkeypatch.setattr(probe, "read_facts", lambda: facts)
    specs = (*plugin.register_kernels(), *reference_provider.register_kernels())
    return rank(CONFIG, HOST, [Candidate(spec, "test", "1") for spec in specs], Policy(**policy))


@pytest.mark.parametrize("facts", [NVIDIA, AMD])
def test_device_cuda_picks_it(monkeypatch, facts: Facts) -> None:
    found = ranking(monkeypatch, facts, device="cuda")
    assert [candidate.spec.name for candidate in found.usable] == ["triton_gpu.grouped_gemm"]


def test_device_cpu_does_not(monkeypatch) -> None:
    found = ranking(monkeypatch, NVIDIA)
    assert [candidate.spec.name for candidate in found.usable] == ["reference.torch"]
    assert found.rejected[0].reason == "is for device cuda, wanted is cpu"


def test_interpreted_it_is_for_the_cpu_and_only_when_named(monkeypatch) -> None:
    facts = Facts(interpreted=True, triton="3.9.0")
    assert "used only when it is named" in ranking(monkeypatch, facts).rejected[0].reason
    named = ranking(monkeypatch, facts, kernel="triton_gpu.grouped_gemm", pinned_by="kernel=")
    assert named.usable[0].spec.device == "cpu"


def test_named_without_a_gpu_says_why(monkeypatch) -> None:
    with pytest.raises(NoKernelError, match="no GPU: the system shows"):
        ranking(monkeypatch, Facts(), device="cuda", kernel="triton_gpu.grouped_gemm", pinned_by="kernel=")


@pytest.mark.parametrize(
    ("files", "nvidia", "amd"),
    [
        ((), False, False),
        (("nvidia0",), True, False),
        (("nvidiactl", "nvidia-uvm"), False, False),  # the driver without a device
        (("kfd",), False, True),
        (("dxg",), True, False),
    ],
)
def test_device_files(tmp_path: Path, files: tuple[str, ...], nvidia: bool, amd: bool) -> None:
    for name in files:
        (tmp_path / name).touch()
    facts = probe.read_facts(dev=tmp_path)
    assert (facts.nvidia, facts.amd) == (nvidia, amd)


@pytest.mark.parametrize("value", ["1", "true", "0", ""])
def test_interpreted_is_what_triton_reads(monkeypatch, value: str) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", value)
    assert probe.read_facts().interpreted is (value in ("1", "true"))


def test_versions_are_read_from_the_modules_without_an_import(monkeypatch, tmp_path: Path) -> None:
    for module, file, text in (
        ("triton", "__init__.py", '"""x"""\n__version__ = \'3.4.2\'\nraise ImportError'),
        ("torch", "version.py", "__version__ = '2.13.0'\ncuda: str | None = '13.0'\nhip: str | None = None\n"),
    ):
        (tmp_path / module).mkdir()
        (tmp_path / module / "__init__.py").write_text("raise ImportError\n")
        (tmp_path / module / file).write_text(text)
    (tmp_path / "nvidia0").touch()
    code = f"from int8moe_triton_gpu.probe import read_facts as r; f = r({str(tmp_path)!r}); print(f.triton, f.torch_build)"
    folders = [str(tmp_path), *(path for path in sys.path if path)]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {folders!r}; {code}"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["3.4.2", "cuda"]


def test_listing_imports_neither_torch_nor_triton() -> None:
    code = (
        "import sys; from int8moe_triton_gpu import plugin; plugin.register_kernels(); "
        "sys.exit(bool({'torch', 'triton'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
