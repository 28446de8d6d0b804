from __future__ import annotations

import _ctypes
import errno
import subprocess
import sys
from pathlib import Path

import pytest

from int8moe import reference_provider
from int8moe.contracts import HostInfo, MoEConfig
from int8moe.native import LibraryUnavailable, NativeLibrary, abi
from int8moe.native import library as native_library
from int8moe.registry import Candidate
from int8moe.selection import Policy, rank
from int8moe_x86_vnni import plugin, probe
from int8moe_x86_vnni.library import LIBRARY
from int8moe_x86_vnni.probe import CpuFacts, refusal

ALL = CpuFacts(**dict.fromkeys(CpuFacts._fields[:-1], True), amx_permission=0)
NO_VNNI = ALL._replace(avx512_vnni=False, avx_vnni=False, amx_tile=False, amx_int8=False, amx_permission=None)
AVX2_ONLY = CpuFacts(avx2=True, os_avx=True)

# {facts: {tier: part of the reason, None = usable}}
EXPECTED = [
    (ALL, dict.fromkeys(probe.TIERS)),
    (
        ALL._replace(os_amx=False, amx_permission=None),
        {"avx2": None, "avx512_vnni": None, "amx_int8": "the system does not enable AMX state (XCR0)"},
    ),
    (
        ALL._replace(amx_permission=errno.EPERM),
        {"avx2": None, "avx512_vnni": None, "amx_int8": "AMX permission refused (Operation not permitted)"},
    ),
    (
        NO_VNNI,
        {"avx2": None, "avx_vnni": "the CPU has no AVX-VNNI", "avx512_vnni": "the CPU has no AVX512-VNNI",
         "amx_int8": "the CPU has no AMX-INT8"},
    ),
    (
        AVX2_ONLY,
        {"avx2": None, "avx_vnni": "the CPU has no AVX-VNNI", "avx512_vnni": "the CPU has no AVX512F/BW/VL",
         "amx_int8": "the CPU has no AMX-INT8"},
    ),
    (
        ALL._replace(os_avx512=False),
        {"avx2": None, "avx512_vnni": "the system does not enable AVX-512 state (XCR0)",
         "amx_int8": "the system does not enable AVX-512 state (XCR0)"},
    ),
    (ALL._replace(os_avx=False), {"avx2": "the system does not enable AVX state (XCR0)"}),
    (CpuFacts(), {"avx2": "the CPU has no AVX2", "amx_int8": "the CPU has no AMX-INT8"}),
]  # fmt: skip


@pytest.mark.parametrize(("facts", "expected"), EXPECTED)
def test_reasons(facts: CpuFacts, expected: dict[str, str | None]) -> None:
    assert {tier: refusal(tier, facts) for tier in expected} == expected


def pretend(monkeypatch, facts: CpuFacts, tiers: tuple[str, ...] = probe.TIERS) -> None:
    """A processor with these facts, and a library that holds these tiers."""
    monkeypatch.setattr(probe, "read_cpu", lambda ask_for_amx: facts)
    monkeypatch.setattr(LIBRARY, "built_tiers", lambda: tiers)


@pytest.mark.parametrize(("facts", "expected"), EXPECTED)
def test_kernels_are_listed_with_the_reasons(monkeypatch, facts: CpuFacts, expected: dict[str, str | None]) -> None:
    pretend(monkeypatch, facts)
    specs = {spec.short_name: spec for spec in plugin.register_kernels()}
    assert set(specs) == set(plugin.isa_ladder)
    for tier, spec in specs.items():
        if tier in expected:
            assert spec.unavailable == expected[tier]


@pytest.mark.parametrize(
    ("permission", "why"),
    [
        (0, None),
        (errno.EPERM, "Operation not permitted"),
        (errno.ENOSPC, "a thread's alternative signal stack is too small for it"),
    ],
)
def test_the_permission_for_amx_is_asked_for(monkeypatch, permission: int, why: str | None) -> None:
    """The kernel is judged by the answer, which a processor gives only when it is asked."""

    def read_cpu(ask_for_amx: bool = False) -> CpuFacts:
        return ALL._replace(amx_permission=permission if ask_for_amx else None)

    pretend(monkeypatch, ALL)
    monkeypatch.setattr(probe, "read_cpu", read_cpu)
    reasons = {spec.short_name: spec.unavailable for spec in plugin.register_kernels()}
    refused = f"AMX permission refused ({why})" if why else None
    assert reasons == {"avx2": None, "avx_vnni": None, "avx512_vnni": None, "amx_int8": refused}


def test_a_tier_that_the_compiler_could_not_build(monkeypatch, native) -> None:
    pretend(monkeypatch, ALL, tiers=("avx2", "avx512_vnni"))
    reasons = {spec.short_name: spec.unavailable for spec in plugin.register_kernels()}
    assert reasons == {"avx2": None, "avx512_vnni": None, "avx_vnni": LIBRARY.not_built, "amx_int8": LIBRARY.not_built}
    assert LIBRARY.not_built.startswith("this install was built without it: its compiler was too old; reinstall")
    with pytest.raises(LibraryUnavailable, match="has no tier amx_int8: this install was built without it"):
        LIBRARY.tier_index("amx_int8")
    assert LIBRARY.tier_index("avx512_vnni") == 1
    pretend(monkeypatch, AVX2_ONLY, tiers=("avx2",))
    reasons = {spec.short_name: spec.unavailable for spec in plugin.register_kernels()}
    assert reasons["amx_int8"] == "the CPU has no AMX-INT8", "what the machine lacks comes first"


def test_the_library_holds_tiers_of_the_ladder(native) -> None:
    built = LIBRARY.built_tiers()
    assert {"avx2", "avx512_vnni"} <= set(built)
    assert built == tuple(tier for tier in plugin.isa_ladder if tier in built)
    assert plugin.isa_ladder == probe.TIERS


def test_unknown_tier_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="avx2, avx_vnni, avx512_vnni, amx_int8"):
        refusal("avx10", ALL)


def test_facts_are_decoded_bit_by_bit() -> None:
    def raw(ebx=0, ecx=0, edx=0, eax1=0, xcr0=0, permission=-1):
        return probe.FACTS.pack(probe.FACTS.size, 0, 0, ebx, ecx, edx, eax1, 0, xcr0, permission, 0)

    assert probe.decode(raw()) == CpuFacts()
    assert probe.decode(raw(ebx=1 << 5, xcr0=0x7)) == AVX2_ONLY
    assert probe.decode(raw(ebx=1 << 5 | 1 << 16 | 1 << 30 | 1 << 31, ecx=1 << 11, edx=3 << 24, eax1=1 << 4,
                            xcr0=0x600E7, permission=0)) == ALL  # fmt: skip
    assert probe.decode(raw(xcr0=0x2)).os_avx is False
    assert probe.decode(raw(xcr0=0x66)).os_avx512 is False


def test_other_machine(monkeypatch) -> None:
    monkeypatch.setattr(native_library.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(LIBRARY, "_loaded", None)
    assert {spec.unavailable for spec in plugin.register_kernels()} == {"machine is aarch64"}


def test_library_missing(monkeypatch) -> None:
    monkeypatch.setattr(native_library.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(LIBRARY, "_loaded", None)
    monkeypatch.setattr(NativeLibrary, "path", None)
    for spec in plugin.register_kernels():
        assert "is missing" in spec.unavailable
        assert "reinstall int8moe-x86-vnni" in spec.unavailable


def test_library_not_loadable(monkeypatch, tmp_path) -> None:
    broken = tmp_path / LIBRARY.file_name
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(native_library.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(LIBRARY, "_loaded", None)
    monkeypatch.setattr(NativeLibrary, "path", broken)
    for spec in plugin.register_kernels():
        assert "does not load" in spec.unavailable


def test_another_library_of_that_name(monkeypatch) -> None:
    monkeypatch.setattr(native_library.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(LIBRARY, "_loaded", None)
    monkeypatch.setattr(NativeLibrary, "path", Path(_ctypes.__file__))
    for spec in plugin.register_kernels():
        assert "does not export int8moe_driver_version; reinstall int8moe-x86-vnni" in spec.unavailable


def test_driver_version_mismatch(native, monkeypatch) -> None:
    monkeypatch.setattr(LIBRARY, "_loaded", None)
    monkeypatch.setattr(abi, "DRIVER_VERSION", 999)
    for spec in plugin.register_kernels():
        assert "driver version 2, this int8moe needs 999" in spec.unavailable


def test_plugin_imports_no_torch() -> None:
    code = (
        "import sys; from int8moe_x86_vnni import plugin; plugin.register_kernels(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("facts", "expected"), EXPECTED)
def test_selection_takes_the_next_usable_kernel(monkeypatch, facts: CpuFacts, expected: dict[str, str | None]) -> None:
    """A reason for each kernel that is rejected, and the process never dies."""
    pretend(monkeypatch, facts)
    words = {name for spec in plugin.register_kernels() for name in spec.isa[0]}
    host = HostInfo(machine="x86_64", system="Linux", features=frozenset(words))
    specs = (*plugin.register_kernels(), *reference_provider.register_kernels())
    candidates = [Candidate(spec, "test", "1", plugin.isa_ladder) for spec in specs]
    config = MoEConfig(num_experts=4, top_k=2, hidden_size=64, intermediate_size=32)
    ranking = rank(config, host, candidates, Policy())
    usable = [tier for tier in reversed(plugin.isa_ladder) if refusal(tier, facts) is None]
    assert [c.spec.name for c in ranking.usable] == [*(f"x86_vnni.{tier}" for tier in usable), "reference.torch"]
    assert {name: reason for name, _, reason in ranking.rejected} == {
        f"x86_vnni.{tier}": refusal(tier, facts) for tier in plugin.isa_ladder if tier not in usable
    }
