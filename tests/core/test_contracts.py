"""Configs and declarations: what is refused, and that nothing here imports torch."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest

from int8moe import ConfigError, KernelSpec, MoEConfig, Numerics, SelectionReport, Unsupported, WeightLayout
from int8moe.contracts import ACTIVATIONS, MAX_REDUCTION

BASE = {"num_experts": 8, "top_k": 2, "hidden_size": 64, "intermediate_size": 32}
SPEC: dict[str, Any] = {
    "name": "acme.fast",
    "target": "acme:Fast",
    "activations": ("silu",),
    "dtypes": ("float32",),
    "layout": "canonical",
    "numerics": Numerics.bitwise(),
}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"num_experts": 0}, "num_experts"),
        ({"top_k": 0}, "top_k"),
        ({"hidden_size": -1}, "hidden_size"),
        ({"intermediate_size": "many"}, "intermediate_size"),
        ({"activation": "sliu"}, "activation"),
        ({"hidden_dtype": "float8"}, "hidden_dtype"),
        ({"swiglu_limit": 0.0}, "swiglu_limit"),
        ({"swiglu_limit": -1.0}, "swiglu_limit"),
        ({"swiglu_limit": float("inf")}, "swiglu_limit"),
        ({"swiglu_limit": 1e39}, "swiglu_limit"),
        ({"swiglu_limit": 3.4028236e38}, "swiglu_limit"),  # rounds to infinity in float32
        ({"swiglu_limit": 1e-46}, "swiglu_limit"),  # rounds to 0
        ({"swiglu_alpha": float("nan")}, "swiglu_alpha"),
        ({"swiglu_alpha": -1e39}, "swiglu_alpha"),
        ({"swiglu_alpha": 1e300}, "swiglu_alpha"),
        ({"apply_router_weight_on_input": True}, "top_k = 1"),
        ({"num_local_experts": 4}, "expert_map"),
        ({"num_local_experts": 9, "has_expert_map": True}, "num_local_experts = 9 is more than num_experts = 8"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_a_bad_config_is_one_line_naming_the_field(change: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word) as caught:
        MoEConfig(**{**BASE, **change})
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    "fields",
    [{"swiglu_limit": 3.4028234e38}, {"swiglu_limit": 1.5e-45}, {"swiglu_alpha": 0.0}, {"swiglu_alpha": -3.4028234e38},
     {"swiglu_alpha": 1e-300}, {"num_local_experts": 8, "has_expert_map": True}, {"num_local_experts": 0, "has_expert_map": True}],
)  # fmt: skip
def test_the_ends_of_the_ranges_are_taken(fields: dict[str, Any]) -> None:
    config = MoEConfig(**{**BASE, **fields})
    assert {name: getattr(config, name) for name in fields} == fields


def test_configs_take_keywords_only_and_do_not_change() -> None:
    with pytest.raises(TypeError):
        MoEConfig(8, 2, 64, 32)  # type: ignore[misc]
    config = MoEConfig(**BASE)
    with pytest.raises(Exception, match="frozen"):
        config.top_k = 3  # type: ignore[misc]


def test_torch_dtypes_are_taken_by_name() -> None:
    torch = pytest.importorskip("torch")
    assert MoEConfig(**BASE, hidden_dtype=torch.bfloat16).hidden_dtype == "bfloat16"


def test_rows_of_w13_follow_the_gate() -> None:
    rows = {name: MoEConfig(**BASE, activation=name).w13_rows for name in ACTIVATIONS}
    assert rows == {name: 32 if name.endswith("_no_mul") else 64 for name in ACTIVATIONS}


@pytest.mark.parametrize(
    "change",
    [{"name": "fast"}, {"name": "a.b.c"}, {"target": "acme.Fast"}, {"target": ":"}, {"activations": ("tanh",)},
     {"priority": 101}, {"dtypes": ("int8",)}],
)  # fmt: skip
def test_bad_specs_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        KernelSpec(**{**SPEC, **change})


def test_tolerance_needs_a_reason_and_a_size() -> None:
    with pytest.raises(ConfigError, match="reason"):
        Numerics.tolerance(rtol=0.01, reason="")
    with pytest.raises(ConfigError, match="bitwise"):
        Numerics.tolerance(rtol=0.0, reason="x")
    with pytest.raises(ConfigError, match="reason"):
        Unsupported("")


def test_layout_tags_tell_layouts_apart() -> None:
    layout = WeightLayout(namespace="acme", name="u8_n16k4")
    variants = [layout, WeightLayout(namespace="acme", name="u8_n16k4", version=2),
                WeightLayout(namespace="other", name="u8_n16k4"), WeightLayout.canonical(),
                WeightLayout(namespace="acme", name="u8_n16k4", numerics_version=2)]  # fmt: skip
    assert len({variant.tag for variant in variants}) == len(variants)
    assert layout.tag == WeightLayout(namespace="acme", name="u8_n16k4", nbytes=7).tag


def test_contracts_pickle_and_compare() -> None:
    for value in (MoEConfig(**BASE), KernelSpec(**SPEC), SelectionReport(chosen="a.b", rejected=(("c.d", "e", "f"),))):
        assert pickle.loads(pickle.dumps(value)) == value
    assert SelectionReport(chosen="a.b", rejected=(("c.d", "dist", "why"),)).rejected[0].reason == "why"


def test_the_reduction_bound_is_the_largest_safe_one() -> None:
    assert MAX_REDUCTION * 255 * 128 < 2**31 <= (MAX_REDUCTION + 1) * 255 * 128


TORCH_FREE = ["int8moe", "int8moe.contracts", "int8moe.hookspecs", "int8moe.errors", "int8moe.host",
              "int8moe.registry", "int8moe.selection", "int8moe.listing", "int8moe.native", "int8moe.native.abi", "int8moe.cli", "int8moe.reference_provider"]  # fmt: skip


@pytest.mark.parametrize("module", TORCH_FREE)
def test_light_modules_import_no_torch(isolated: Callable[..., Any], module: str) -> None:
    done = isolated(f"import sys, {module}; assert 'torch' not in sys.modules, 'torch is imported'")
    assert done.returncode == 0, done.stderr


def test_authors_names_import_no_torch(isolated: Callable[..., Any]) -> None:
    done = isolated(
        """
        import os, sys
        from int8moe import (KernelSpec, WeightLayout, Numerics, Supported, Unsupported, HostInfo, SelectionReport,
                             hookimpl, PLUGIN_API_VERSION, NUMERICS_VERSION, get_include, list_kernels)
        assert list_kernels()
        assert "torch" not in sys.modules
        assert os.path.isfile("".join([get_include(), "/int8moe/driver.h"]))
        from int8moe import ExpertWeights, FusedMoE
        assert "torch" in sys.modules
        """
    )
    assert done.returncode == 0, done.stderr


def test_the_operator_is_there_after_torch_and_int8moe(isolated: Callable[..., Any]) -> None:
    done = isolated("import torch, int8moe; torch.ops.int8moe.fused_experts.default")
    assert done.returncode == 0, done.stderr
