"""Selection as a pure function of faked candidates and hosts, and the variables that steer it."""

from __future__ import annotations

from typing import Any

import pytest

from int8moe import ConfigError, HostInfo, KernelSpec, MoEConfig, NoKernelError, Numerics, select_kernel
from int8moe.contracts import ACTIVATIONS, HIDDEN_DTYPES
from int8moe.registry import Candidate
from int8moe.selection import Policy, Ranking, rank
from plugin_folder import PluginFolder

CONFIG = MoEConfig(num_experts=8, top_k=2, hidden_size=64, intermediate_size=32)
LADDER = ("scalar", "wide", "matrix")
ALL = ("bias", "no_gate", "expert_map", "apply_router_weight_on_input")


def candidate(short_name: str, **fields: Any) -> Candidate:
    declared: dict[str, Any] = {
        "name": f"acme.{short_name}", "target": "acme:X", "activations": ACTIVATIONS, "dtypes": HIDDEN_DTYPES,
        "features": ALL, "layout": "canonical", "numerics": Numerics.bitwise(),
    }  # fmt: skip
    return Candidate(KernelSpec(**{**declared, **fields}), "acme-kernels", "1.0", LADDER)


TIERS = [
    candidate("scalar", priority=20),
    candidate("wide", priority=50, isa=(("v1", "v2"), ("other",))),
    candidate("matrix", priority=80, isa=(("v1", "v2", "m"),)),
]


def host(*features: str) -> HostInfo:
    return HostInfo(machine="toaster", system="Linux", features=frozenset(features))


def ranked(*features: str, config: MoEConfig = CONFIG, pool: list[Candidate] = TIERS, **policy: Any) -> Ranking:
    return rank(config, host(*features), pool, Policy(**policy))


def names(ranking: Ranking) -> list[str]:
    return [c.spec.short_name for c in ranking.usable]


def test_the_highest_usable_priority_wins() -> None:
    assert names(ranked("v1", "v2", "m")) == ["matrix", "wide", "scalar"]
    assert names(ranked("v1", "v2")) == ["wide", "scalar"]
    assert names(ranked("other")) == ["wide", "scalar"]
    assert names(ranked()) == ["scalar"]


def test_each_rejected_kernel_has_its_reason() -> None:
    reasons = {r.name: r.reason for r in ranked("v1").rejected}
    assert "lacks v2, m" in reasons["acme.matrix"]
    assert "lacks v2" in reasons["acme.wide"]
    assert all(r.distribution == "acme-kernels" for r in ranked().rejected)


def test_ties_go_by_name() -> None:
    pool = [candidate("b"), candidate("c"), candidate("a")]
    assert names(ranked(pool=pool)) == ["a", "b", "c"]


def test_the_plugin_s_own_finding_counts_on_this_machine_only() -> None:
    pool = [candidate("scalar", unavailable="the system does not enable the state")]
    assert ranked(pool=pool).rejected[0].reason == "the system does not enable the state"
    assert names(ranked(pool=pool, hypothetical=True)) == ["scalar"]


@pytest.mark.parametrize(
    ("cap", "left"), [("scalar", ["scalar"]), ("wide", ["wide", "scalar"]), ("matrix", ["matrix", "wide", "scalar"])]
)
def test_max_isa_caps_the_ladder(cap: str, left: list[str]) -> None:
    ranking = ranked("v1", "v2", "m", max_isa=cap)
    assert names(ranking) == left
    assert all(f"INT8MOE_MAX_ISA={cap}" in r.reason for r in ranking.rejected)


def test_an_unknown_max_isa_lists_the_valid_ones() -> None:
    with pytest.raises(ConfigError, match="did you mean matrix.*acme: scalar, wide, matrix"):
        ranked(max_isa="matrx")


@pytest.mark.parametrize(
    ("spec", "config", "word"),
    [
        ({"activations": ("gelu",)}, {}, "activation silu"),
        ({"dtypes": ("float32",)}, {"hidden_dtype": "bfloat16"}, "bfloat16"),
        ({"features": ()}, {"has_bias": True}, "bias"),
        ({"features": ()}, {"activation": "silu_no_mul"}, "no_gate"),
        ({"features": ()}, {"has_expert_map": True}, "expert_map"),
        ({"features": ()}, {"top_k": 1, "apply_router_weight_on_input": True}, "apply_router_weight_on_input"),
        ({"schemes": ("w4a8",)}, {}, "w8a8"),
        ({"device": "cuda"}, {}, "cuda"),
        ({"auto_select": False}, {}, "named"),
        ({}, {"hidden_size": 65_794}, "65,793"),
        ({}, {"intermediate_size": 65_794}, "65,793"),
    ],
)
def test_what_a_kernel_does_not_declare_is_refused(spec: dict[str, Any], config: dict[str, Any], word: str) -> None:
    ranking = ranked(config=MoEConfig(**{**CONFIG.model_dump(), **config}), pool=[candidate("scalar", **spec)])
    assert names(ranking) == []
    assert word in ranking.rejected[0].reason


def test_the_bound_itself_is_allowed() -> None:
    config = MoEConfig(num_experts=1, top_k=1, hidden_size=65_793, intermediate_size=65_793)
    assert names(ranked(config=config)) == ["scalar"]
    with pytest.raises(NoKernelError, match="65,793"):
        select_kernel(config.model_copy(update={"hidden_size": 65_794}))


def test_a_pinned_kernel_never_falls_back() -> None:
    assert names(ranked("v1", "v2", "m", kernel="acme.wide", pinned_by="kernel=")) == ["wide"]
    with pytest.raises(NoKernelError, match="acme.matrix.*lacks v1, v2, m"):
        ranked(kernel="acme.matrix", pinned_by="kernel=")


@pytest.mark.parametrize(("has", "asked"), [("cuda", "cpu"), ("cpu", "cuda"), ("meta", "cpu")])
def test_a_pinned_kernel_of_another_device_says_how_to_ask_for_it(has: str, asked: str) -> None:
    with pytest.raises(NoKernelError, match=f"is for device {has}, wanted is {asked}. device='{has}' asks for it"):
        ranked(pool=[candidate("scalar", device=has)], device=asked, kernel="acme.scalar", pinned_by="kernel=")
    with pytest.raises(NoKernelError) as error:
        ranked(kernel="acme.matrix", pinned_by="kernel=")
    assert "asks for it" not in str(error.value), "the device is not what is in the way"


def test_pinning_takes_what_automatic_selection_leaves_out() -> None:
    pool = [candidate("scalar", auto_select=False)]
    assert names(ranked(pool=pool, kernel="acme.scalar", pinned_by="kernel=")) == ["scalar"]


def test_an_unknown_name_gets_near_names_and_the_list() -> None:
    with pytest.raises(NoKernelError, match="'reference.troch'.*did you mean reference.torch") as caught:
        select_kernel(CONFIG, kernel="reference.troch")
    assert "Registered:" in str(caught.value)


def test_the_variable_pins_and_the_argument_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INT8MOE_KERNEL", "reference.torch")
    report = select_kernel(CONFIG)
    assert (report.chosen, report.pinned) == ("reference.torch", "INT8MOE_KERNEL")
    monkeypatch.setenv("INT8MOE_KERNEL", "nonsense.kernel")
    with pytest.raises(NoKernelError, match="nonsense"):
        select_kernel(CONFIG)
    assert select_kernel(CONFIG, kernel="reference.torch").pinned == "kernel="


def test_no_kernel_error_carries_every_reason_and_the_report() -> None:
    with pytest.raises(NoKernelError) as caught:
        select_kernel(CONFIG, device="meta")
    assert "reference.torch" in str(caught.value)
    assert "int8moe list-kernels" in str(caught.value)
    assert caught.value.report is not None


def test_deciding_for_another_host_loads_nothing(plugins: PluginFolder) -> None:
    plugins.add_good(isa='(("toast",),)')
    found = plugins.json(
        """
        import json, sys
        from int8moe import HostInfo, MoEConfig
        from int8moe.binding import select_kernel
        config = MoEConfig(num_experts=8, top_k=2, hidden_size=64, intermediate_size=32)
        chosen = [select_kernel(config, host=HostInfo(machine="x", system="Linux", features=frozenset(f))).chosen
                  for f in ({"toast"}, set())]
        print(json.dumps([chosen, "acme_plugin_experts" in sys.modules]))
        """,
        INT8MOE_PLUGINS="acme",
    )
    assert found == [["acme.fast", "reference.torch"], False]
