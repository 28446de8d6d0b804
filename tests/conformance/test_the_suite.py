"""The suite itself: wrong kernels are caught by the right group, right ones pass, and the runner says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from wrong_kernels import CAUGHT_BY, OneBit, Provider, SelfTest

from int8moe import Numerics, hookimpl, register_kernel
from int8moe.reference import ReferenceExperts
from int8moe.registry import get_registry
from int8moe.testing import GROUPS, Target, assert_same_bits, collect_cases, make_layer, run_kernel, same_bits, threads
from int8moe.testing.case import CaseSkipped
from int8moe.testing.runner import format_result, passed
from int8moe.testing.settings import settings


@pytest.fixture
def registered():
    """Register a kernel class for one test; return its name."""

    def register(cls: type, **fields: object) -> str:
        return register_kernel(Provider(cls, **fields))[0].name

    yield register
    get_registry().unregister("wrong")


def failures(name: str, group: str, *, stop: bool = True) -> list[str]:
    """Failure messages of one group; the first is enough to know."""
    target, found = Target(name, threads=(1,)), []
    for case in collect_cases("reduced", [group]):
        try:
            case.run_on(target)
        except CaseSkipped:
            continue
        except Exception as error:
            found.append(f"{case.id}: {error}")
            if stop:
                break
    return found


@pytest.mark.parametrize(("cls", "group"), CAUGHT_BY.items(), ids=[c.__name__ for c in CAUGHT_BY])
def test_a_wrong_kernel_is_caught(registered, cls, group):
    assert failures(registered(cls), group)


@pytest.mark.parametrize("setting", settings(), ids=lambda setting: setting.name)
def test_a_kernel_that_changes_a_setting_of_the_process_is_caught(registered, setting):
    class Changes(ReferenceExperts):
        @hookimpl
        def apply(self, layer, hidden_states, topk_weights, topk_ids, out):
            super().apply(layer, hidden_states, topk_weights, topk_ids, out)
            setting.put(setting.values[0])

    before = setting.get()
    try:
        found = failures(registered(Changes), "process")
        assert f"the kernel changes {setting.text}" in found[0]
    finally:
        setting.put(before)


def test_one_bit_is_named(registered):
    message = failures(registered(OneBit), "bits")[0]
    assert "bits differ in 1 of" in message
    assert "threads 1" in message


def test_a_kernel_that_fails_its_self_test_is_reported_once(registered):
    name = registered(SelfTest)
    result = run_kernel(name, grid="reduced", groups=["declaration", "bits"])
    assert not passed(result)
    declaration, bits = result["groups"]
    assert declaration["failed"]
    assert any("self-test" in failure["message"] for failure in declaration["failures"])
    assert bits["failed"] == 0
    assert bits["passed"] == 0
    assert {skip["reason"] for skip in bits["skips"]} == {"the kernel does not bind"}  # why is said once, above
    (alone,) = run_kernel(name, grid="reduced", groups=["bits"])["groups"]
    assert "does not bind: " in alone["skips"][0]["reason"]
    assert "self-test" in alone["skips"][0]["reason"]


class Small(ReferenceExperts):
    """Declares little, and does that right."""


def test_a_kernel_that_declares_little_passes(registered):
    name = registered(Small, activations=("gelu",), dtypes=("float32",), features=(), numerics=Numerics.bitwise())
    groups = ["declaration", "integers", "routing", "strides", "refusals"]
    result = run_kernel(name, grid="reduced", groups=groups, threads=(1,))
    assert passed(result), format_result(result)
    skipped = {skip["reason"] for group in result["groups"] for skip in group["skips"]}
    assert "feature 'expert_map' is not declared" in skipped


class Close(ReferenceExperts):
    """Within a tolerance that it declares."""

    @hookimpl
    def apply(self, layer, hidden_states, topk_weights, topk_ids, out):
        super().apply(layer, hidden_states, topk_weights, topk_ids, out)
        out *= 1.002


def test_a_tolerance_is_compared_as_declared(registered):
    numerics = Numerics.tolerance(rtol=0.01, reason="another rounding")
    name = registered(Close, numerics=numerics, auto_select=False, dtypes=("float32",))
    result = run_kernel(name, grid="reduced", groups=["bits", "batch"], threads=(1,))
    assert passed(result), format_result(result)
    assert "as declared: tolerance" in format_result(result)


def test_a_tolerance_that_is_exceeded_is_caught(registered):
    numerics = Numerics.tolerance(rtol=0.0001, reason="hope")
    name = registered(Close, numerics=numerics, auto_select=False, dtypes=("float32",))
    with pytest.raises(Exception, match="tolerance"):
        Target(name).bound  # noqa: B018


# ---- bits ------------------------------------------------------------------------------------------------


def test_same_bits():
    nan = torch.tensor([float("nan"), 1.0])
    other = torch.tensor([0x7FC00001, 0x3F800000], dtype=torch.int32).view(torch.float32)
    assert same_bits(nan, other)
    assert same_bits(nan, -nan.abs() * 1) is False  # 1.0 against -1.0
    assert not same_bits(torch.zeros(1), -torch.zeros(1))
    assert not same_bits(torch.zeros(1), torch.zeros(1, dtype=torch.float64))
    assert not same_bits(torch.zeros(1), torch.zeros(1, 1))
    assert same_bits(torch.empty(0, 3), torch.empty(0, 3))
    assert same_bits(torch.tensor([1, 2]), torch.tensor([1, 2]))
    assert same_bits(torch.eye(3).t(), torch.eye(3))
    assert same_bits(torch.ones(1).expand(4), torch.ones(4))


def test_the_message_names_index_values_patterns_and_count():
    expected = torch.ones(2, 3)
    actual = expected.clone()
    actual.view(torch.int32)[1, 0] += 1
    actual[1, 2] = 2.0
    with pytest.raises(AssertionError) as caught:
        assert_same_bits(actual, expected, "here")
    text = str(caught.value)
    assert text.startswith("here: bits differ in 2 of 6 elements, first at [1, 0]")
    assert "0x3f800001" in text
    assert "0x3f800000" in text


def test_negative_patterns_are_unsigned():
    with pytest.raises(AssertionError, match="0x8000.*0x0000"):
        assert_same_bits(-torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.bfloat16))


def test_threads_puts_both_back():
    from int8moe import host

    before = torch.get_num_threads(), host.thread_limit()
    with threads(3):
        assert (torch.get_num_threads(), host.thread_limit()) == (3, 3)
        with threads(1):
            assert (torch.get_num_threads(), host.thread_limit()) == (1, 1)
        assert torch.get_num_threads() == 3
    assert (torch.get_num_threads(), host.thread_limit()) == before


def test_make_layer():
    layer = make_layer(hidden_size=40, activation="gelu", kernel="reference.torch")
    assert layer.config.hidden_size == 40
    out = layer(torch.ones(2, 40), torch.ones(2, 2), torch.zeros(2, 2, dtype=torch.int32))
    assert out.shape == (2, 40)


# ---- cases, runner, pytest -------------------------------------------------------------------------------


def test_case_names_are_unique_and_readable():
    for grid in ("reduced", "default"):
        ids = [case.id for case in collect_cases(grid)]
        assert len(ids) == len(set(ids))
        assert all(name.isascii() and " " not in name for name in ids)
        assert {name.partition("-")[0] for name in ids} == set(GROUPS)


def test_the_default_grid_makes_enough_comparisons():
    from int8moe.testing.groups import bits

    layers = list(bits.grid_layers("default"))
    everything = [call for layer in layers for call in layer.calls]
    assert len(everything) * 3 >= 1_500  # of the group "bits" alone, for each kernel
    pairs = {(layer.config.activation, call.dtype) for layer in layers for call in layer.calls}
    assert len(pairs) == 8 * 3
    assert {call.tokens for call in everything} >= {0, 1, 2, 3, 5, 16, 17, 33, 64}


def test_the_layers_of_a_grid_are_its_cases():
    """Who checks a library without torch reads the same layers as data."""
    from int8moe.testing.groups import bits

    layers = list(bits.grid_layers("reduced"))
    assert [layer.name for layer in layers] == [case.name for case in bits.cases("reduced")]
    layer = next(layer for layer in layers if layer.config.has_expert_map)
    x, weights, ids = layer.calls[0].inputs(layer.config)
    assert x.shape == (layer.calls[0].tokens, layer.config.hidden_size)
    assert weights.shape == ids.shape == (layer.calls[0].tokens, layer.config.top_k)
    assert bits.local_map(layer.config).unique().tolist() == [-1, *range(layer.config.local_experts)]


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run this Python, which finds what this process finds, from any folder."""
    paths = os.pathsep.join(str(Path(p).resolve()) for p in sys.path if p)
    command, env = [sys.executable, *arguments], {**os.environ, "PYTHONPATH": paths}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)


def run_module(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "int8moe.testing", *arguments)


def test_the_runner_prints_one_document():
    run = run_module("reference.torch", "--group", "declaration", "--json")
    assert run.returncode == 0, run.stderr
    document = json.loads(run.stdout)
    assert document["kernel"] == "reference.torch"
    assert document["numerics"] == "bitwise"
    assert document["groups"][0]["name"] == "declaration"
    assert set(document["groups"][0]) == {
        "name", "passed", "failed", "skipped", "seconds", "failures", "skips",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "status", "word"),
    [
        (("reference.torhc",), 1, "did you mean reference.torch"),
        (("reference.torch", "--group", "bitz"), 2, "bits"),
        (("reference.torch", "--threads", "0"), 2, "--threads"),
        (("reference.torch", "--grid", "huge"), 2, "reduced"),
        ((), 2, "kernel"),
    ],
)
def test_wrong_usage(arguments, status, word):
    run = run_module(*arguments)
    assert run.returncode == status
    assert word in run.stderr
    assert "Traceback" not in run.stderr
    assert run.stdout == ""


def test_the_pytest_plugin_is_light():
    code = (
        "import sys, int8moe.testing.pytest_plugin\n"
        "heavy = {'torch', 'pydantic', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    run = run_python("-c", code)
    assert run.returncode == 0, run.stderr


def test_a_copy_for_another_device_keeps_its_strides():
    """A kernel of another device meets the views that a case makes, not their contiguous copies."""
    from int8moe.testing.groups.strides import VIEWS
    from int8moe.testing.target import copy_with_strides

    values = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    for name, view in VIEWS.items():
        there = copy_with_strides(view(values), "meta")
        assert there.device.type == "meta", name
        assert (there.shape, there.stride()) == (view(values).shape, view(values).stride()), name
        assert_same_bits(copy_with_strides(view(values), "cpu"), view(values), name)
