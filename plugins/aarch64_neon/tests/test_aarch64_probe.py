from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from int8moe import reference_provider
from int8moe.contracts import HostInfo, MoEConfig
from int8moe.native import NativeLibrary
from int8moe.native import library as native_library
from int8moe.registry import Candidate
from int8moe.selection import Policy, rank
from int8moe_aarch64_neon import plugin, probe
from int8moe_aarch64_neon.library import LIBRARY
from int8moe_aarch64_neon.probe import CpuFacts, refusal

ALL = CpuFacts(asimd=True, atomics=True, dotprod=True, i8mm=True)
NEON_ONLY = CpuFacts(asimd=True)
NO_ASIMD = "the CPU has no Advanced SIMD"
NO_DOTPROD = "the CPU has no int8 dot products (FEAT_DotProd)"
NO_I8MM = "the CPU has no int8 matrix multiplication (FEAT_I8MM)"
NO_ATOMICS = "the CPU has no large-system atomics (FEAT_LSE)"

# {facts: {tier: the reason, None = usable}}
EXPECTED = [
    (ALL, {"neon": None, "dotprod": None, "i8mm": None}),
    (ALL._replace(i8mm=False), {"neon": None, "dotprod": None, "i8mm": NO_I8MM}),
    (ALL._replace(dotprod=False), {"neon": None, "dotprod": NO_DOTPROD, "i8mm": None}),
    (ALL._replace(atomics=False), {"neon": None, "dotprod": NO_ATOMICS, "i8mm": NO_ATOMICS}),
    (NEON_ONLY, {"neon": None, "dotprod": NO_DOTPROD, "i8mm": NO_I8MM}),
    (CpuFacts(), {"neon": NO_ASIMD, "dotprod": NO_DOTPROD, "i8mm": NO_I8MM}),
]


@pytest.mark.parametrize(("facts", "expected"), EXPECTED)
def test_reasons(facts: CpuFacts, expected: dict[str, str | None]) -> None:
    assert {tier: refusal(tier, facts) for tier in probe.TIERS} == expected


def pretend(monkeypatch, facts: CpuFacts, tiers: tuple[str, ...] = probe.TIERS) -> None:
    """A processor with these facts, and a library that holds these tiers."""
    monkeypatch.setattr(probe, "read_cpu", lambda: facts)
    monkeypatch.setattr(LIBRARY, "built_tiers", lambda: tiers)


def reasons() -> dict[str, str | None]:
    return {spec.short_name: spec.unavailable for spec in plugin.register_kernels()}


@pytest.mark.parametrize(("facts", "expected"), EXPECTED)
def test_kernels_are_listed_with_the_reasons(monkeypatch, facts: CpuFacts, expected: dict[str, str | None]) -> None:
    pretend(monkeypatch, facts)
    assert reasons() == expected
    assert tuple(expected) == plugin.isa_ladder == probe.TIERS


def test_a_tier_that_the_compiler_could_not_build(monkeypatch) -> None:
    pretend(monkeypatch, ALL, tiers=("neon", "dotprod"))
    assert reasons() == {"neon": None, "dotprod": None, "i8mm": LIBRARY.not_built}
    assert "reinstall int8moe-aarch64-neon with gcc 10, clang 11 or newer" in LIBRARY.not_built
    pretend(monkeypatch, NEON_ONLY, tiers=("neon",))
    assert reasons()["i8mm"] == NO_I8MM, "what the machine lacks comes first"


def test_unknown_tier_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="neon, dotprod, i8mm"):
        refusal("sve", ALL)


def test_facts_are_decoded_bit_by_bit() -> None:
    def raw(hwcap: int = 0, hwcap2: int = 0) -> bytes:
        return probe.FACTS.pack(probe.FACTS.size, 0, hwcap, hwcap2)

    assert probe.decode(raw()) == CpuFacts()
    assert probe.decode(raw(hwcap=1 << 1)) == NEON_ONLY
    assert probe.decode(raw(1 << 1 | 1 << 8 | 1 << 20, 1 << 13)) == ALL
    everything_else = (1 << 64) - 1 - (1 << 1 | 1 << 8 | 1 << 20), (1 << 64) - 1 - (1 << 13)
    assert probe.decode(raw(*everything_else)) == CpuFacts()


@pytest.mark.parametrize("machine", ["x86_64", "s390x"])
def test_other_machine(monkeypatch, machine: str) -> None:
    monkeypatch.setattr(native_library.platform, "machine", lambda: machine)
    monkeypatch.setattr(LIBRARY, "_loaded", None)
    assert set(reasons().values()) == {f"machine is {machine}"}


@pytest.mark.parametrize("machine", ["aarch64", "arm64"])
def test_library_missing(monkeypatch, machine: str) -> None:
    monkeypatch.setattr(native_library.platform, "machine", lambda: machine)
    monkeypatch.setattr(LIBRARY, "_loaded", None)
    monkeypatch.setattr(NativeLibrary, "path", None)
    for reason in reasons().values():
        assert reason is not None
        assert "is missing" in reason
        assert "reinstall int8moe-aarch64-neon" in reason


def test_library_not_loadable(monkeypatch, tmp_path: Path) -> None:
    broken = tmp_path / LIBRARY.file_name
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(native_library.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(LIBRARY, "_loaded", None)
    monkeypatch.setattr(NativeLibrary, "path", broken)
    for reason in reasons().values():
        assert reason is not None
        assert "does not load" in reason


def test_plugin_imports_no_torch() -> None:
    code = "import sys; from int8moe_aarch64_neon import plugin; plugin.register_kernels(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Feature words of a machine that has all that the tiers need, as Linux and as macOS spell them.
LINUX = {"asimd", "atomics", "asimddp", "i8mm"}
MACOS = {"advsimd", "feat_lse", "feat_dotprod", "feat_i8mm"}


@pytest.mark.parametrize("words", [LINUX, MACOS], ids=["Linux", "macOS"])
@pytest.mark.parametrize(("facts", "expected"), EXPECTED)
def test_selection_takes_the_next_usable_kernel(
    monkeypatch, words: set[str], facts: CpuFacts, expected: dict[str, str | None]
) -> None:
    """A reason for each kernel that is rejected, and the process never dies."""
    pretend(monkeypatch, facts)
    host = HostInfo(machine="aarch64", system="Linux", features=frozenset(words))
    specs = (*plugin.register_kernels(), *reference_provider.register_kernels())
    candidates = [Candidate(spec, "test", "1", plugin.isa_ladder) for spec in specs]
    config = MoEConfig(num_experts=4, top_k=2, hidden_size=64, intermediate_size=32)
    ranking = rank(config, host, candidates, Policy())
    usable = [tier for tier in reversed(plugin.isa_ladder) if expected[tier] is None]
    assert [c.spec.name for c in ranking.usable] == [*(f"aarch64_neon.{tier}" for tier in usable), "reference.torch"]
    assert {name: reason for name, _, reason in ranking.rejected} == {
        f"aarch64_neon.{tier}": reason for tier, reason in expected.items() if reason is not None
    }
