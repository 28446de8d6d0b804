"""What is declared on which machine, and why a tier is refused."""

from __future__ import annotations

import subprocess
import sys

import pytest

from int8moe import reference_provider
from int8moe.contracts import HostInfo, MoEConfig
from int8moe.native.library import platform
from int8moe.registry import Candidate
from int8moe.selection import Policy, rank
from int8moe_s390x_vxe import plugin, probe
from int8moe_s390x_vxe.library import LIBRARY
from int8moe_s390x_vxe.probe import CpuFacts, refusal

NO_VX = "the vector facility (vx) is not there, or not enabled by the system"
NO_VXE = "the CPU has no vector-enhancements facility 1 (vxe)"

# {machine: (its facts, {tier: why not})}
EXPECTED = {
    "z14": (CpuFacts(vx=True, vxe=True), {"scalar": None, "vx": None, "vxe": None}),
    "z13": (CpuFacts(vx=True), {"scalar": None, "vx": None, "vxe": NO_VXE}),
    "zEC12": (CpuFacts(), {"scalar": None, "vx": NO_VX, "vxe": NO_VX}),
    "vxe alone, as emulators have it": (CpuFacts(vxe=True), {"scalar": None, "vx": NO_VX, "vxe": NO_VX}),
}


@pytest.fixture(params=list(EXPECTED))
def pretended(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """A machine that is pretended to be here, as the tiers' refusals."""
    facts, reasons = EXPECTED[request.param]
    monkeypatch.setattr(probe, "read_cpu", lambda: facts)
    monkeypatch.setattr(LIBRARY, "built_tiers", lambda: probe.TIERS)
    return reasons


def test_kernels_are_listed_with_the_reasons(pretended: dict[str, str | None]) -> None:
    specs = plugin.register_kernels()
    assert [spec.short_name for spec in specs] == list(plugin.isa_ladder) == list(probe.TIERS)
    assert {spec.short_name: spec.unavailable for spec in specs} == pretended


def test_selection_takes_the_best_usable_tier(pretended: dict[str, str | None]) -> None:
    words = {"scalar": set(), "vx": {"vx"}, "vxe": {"vx", "vxe"}}
    best = [tier for tier, reason in pretended.items() if reason is None][-1]
    host = HostInfo(machine="s390x", system="Linux", features=frozenset(words[best]))
    specs = (*plugin.register_kernels(), *reference_provider.register_kernels())
    candidates = [Candidate(spec, "test", "1", plugin.isa_ladder) for spec in specs]
    config = MoEConfig(num_experts=4, top_k=2, hidden_size=64, intermediate_size=32)
    ranking = rank(config, host, candidates, Policy())
    usable = [tier for tier, reason in reversed(pretended.items()) if reason is None]
    assert [c.spec.name for c in ranking.usable] == [*(f"s390x_vxe.{tier}" for tier in usable), "reference.torch"]
    assert {name: why for name, _, why in ranking.rejected} == {
        f"s390x_vxe.{tier}": why for tier, why in pretended.items() if why is not None
    }


def test_facts_are_decoded_bit_by_bit() -> None:
    def of(hwcap: int) -> CpuFacts:
        return probe.decode(probe.FACTS.pack(probe.FACTS.size, 0, hwcap))

    assert of(0) == CpuFacts()
    assert of(1 << 11) == CpuFacts(vx=True)
    assert of(1 << 13) == CpuFacts(vxe=True)
    assert of(~(1 << 11 | 1 << 13) & 2**64 - 1) == CpuFacts()


def test_an_unknown_tier_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown tier 'vxe2'; known: scalar, vx, vxe"):
        refusal("vxe2", CpuFacts())


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_another_machine(monkeypatch: pytest.MonkeyPatch, machine: str) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(LIBRARY, "_loaded", None)
    assert {spec.unavailable for spec in plugin.register_kernels()} == {f"machine is {machine}"}


def test_an_install_without_native_code(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "s390x")
    monkeypatch.setattr(LIBRARY, "_loaded", None)
    monkeypatch.setattr(sys.modules["int8moe_s390x_vxe"], "__path__", [str(tmp_path)])
    (reason,) = {spec.unavailable for spec in plugin.register_kernels()}
    assert reason == (
        "libint8moe_s390x_vxe.so is missing: this install was built without native code; reinstall int8moe-s390x-vxe"
    )


def test_the_plugin_imports_no_torch() -> None:
    code = (
        "import sys; from int8moe_s390x_vxe import plugin; plugin.register_kernels(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
