"""The pytest plugin: three lines adopt the suite, options narrow it, fixtures and the summary."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import torch

from int8moe.layer import FusedMoE
from int8moe.registry import get_registry

ADOPT = 'from int8moe.testing.suite import *  # noqa: F403\n\nkernel = "reference.torch"\n'

# A plugin of two kernels in the process of the run; one of them cannot run here.
CONFTEST = """
from int8moe import KernelSpec, Numerics, hookimpl, register_kernel
from int8moe.reference import ReferenceExperts

class Provider:
    @hookimpl
    def register_kernels(self):
        common = dict(target=ReferenceExperts, layout="canonical", numerics=Numerics.bitwise(), auto_select=False)
        return [
            KernelSpec(name="far.here", activations=("silu", "gelu"), dtypes=("float32",), **common),
            KernelSpec(name="far.away", activations=("silu",), dtypes=("float32",),
                unavailable="the moon is not in sight", **common),
        ]

register_kernel(Provider())
"""


class Run:
    """pytest runs in a folder of their own."""

    def __init__(self, pytester: pytest.Pytester) -> None:
        self.pytester = pytester

    def __call__(self, *arguments: str, processes: int = 1, **files: str) -> tuple[pytest.RunResult, str]:
        if files:
            self.pytester.makepyfile(**files)
        options = ("-p", "no:cacheprovider", *arguments)
        if processes == 1:
            result = self.pytester.runpytest_inprocess(*options)
        else:
            result = self.pytester.runpytest_subprocess(*options, "-n", str(processes))
        get_registry().unregister("far")  # of CONFTEST
        text = result.stdout.str() + result.stderr.str()
        assert "INTERNALERROR" not in text
        return result, text


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(str(Path(p).resolve()) for p in sys.path if p))
    return Run(pytester)


def test_three_lines_adopt_the_suite(run):
    arguments = ("-k", "declaration or refusals", "--int8moe-grid", "reduced")
    result, text = run(*arguments, test_mine=ADOPT)
    assert result.ret == 0, text
    assert result.parseoutcomes()["passed"] > 20
    assert "int8moe: 0 bit-exact comparisons" not in text
    assert "bit-exact comparisons" in text
    assert "not run" not in text
    _, text = run("--collect-only", "-q", "-k", "routing")
    assert "test_mine.py::test_conformance[reference.torch-routing-slot-order]" in text


def test_one_group(run):
    _, text = run("--int8moe-group", "declaration", "--collect-only", "-q", test_mine=ADOPT)
    ids = [line for line in text.splitlines() if line.startswith("test_mine")]
    assert len(ids) == 7
    assert all("[reference.torch-declaration-" in line for line in ids)


def test_an_activation_a_dtype_and_a_shape(run, monkeypatch):
    narrow = ("--int8moe-activation", "gelu", "--int8moe-dtype", "float16", "--int8moe-shape", "40x24")
    groups = ("--int8moe-group", "bits", "--int8moe-group", "special")
    seen = set()
    original = FusedMoE.forward

    def forward(layer, hidden_states, *rest, **more):
        if layer.kernel.name == "far.here":
            config = layer.config
            seen.add((config.activation, hidden_states.dtype, config.hidden_size, config.intermediate_size))
        return original(layer, hidden_states, *rest, **more)

    monkeypatch.setattr(FusedMoE, "forward", forward)
    conftest = CONFTEST.replace('("float32",), **common),', '("float32", "float16"), **common),', 1)
    mine = ADOPT.replace("reference.torch", "far.here")
    result, text = run("--int8moe-grid", "reduced", *narrow, *groups, conftest=conftest, test_mine=mine)
    assert result.ret == 0, text
    assert seen == {("gelu", torch.float16, 40, 24)}
    assert "\nint8moe: only activation gelu; dtype float16; shape 40x24\n" in text
    outcomes = result.parseoutcomes()
    assert outcomes["passed"] > 20
    assert outcomes["skipped"] > 5


def test_narrowing_to_what_a_kernel_lacks_runs_nothing(run):
    arguments = ("--int8moe-dtype", "bfloat16", "--int8moe-group", "routing", "-rs", "--int8moe-grid", "reduced")
    result, text = run(*arguments, conftest=CONFTEST, test_mine=ADOPT.replace("reference.torch", "far.here"))
    assert result.ret == 0, text
    assert set(result.parseoutcomes()) == {"skipped"}
    assert "dtype bfloat16 is not declared" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--int8moe-group", "bitz"), ["'bitz'", "did you mean bits", "declaration, packing"]),
        (("--int8moe-activation", "silo"), ["'silo'", "did you mean silu", "gelu_tanh"]),
        (("--int8moe-dtype", "float64"), ["'float64'", "bfloat16, float16, float32"]),
        (("--int8moe-shape", "40"), ["'40' is no shape", "2048x768"]),
        (("--int8moe-shape", "0x8"), ["'0x8' is no shape", "65793"]),
        (("--int8moe-kernel", "reference.torhc"), ["did you mean reference.torch"]),
        (("--int8moe-grid", "huge"), ["reduced"]),
    ],
    ids=" ".join,
)
def test_a_wrong_word_is_a_usage_error(run, arguments, words):
    result, text = run(*arguments, test_mine=ADOPT)
    assert result.ret != 0
    for word in words:
        assert word in text
    assert "Traceback" not in text
    assert "another exception" not in text
    assert "under_test.py" not in text


def test_a_kernel_named_twice_is_tested_once(run):
    arguments = ("--int8moe-group", "declaration", "--collect-only", "-q")
    _, once = run(*arguments, "--int8moe-kernel", "reference.torch", test_mine=ADOPT)
    _, twice = run(*arguments, *(2 * ("--int8moe-kernel", "reference.torch")), test_mine=ADOPT)
    assert once.count("[reference.torch-") == twice.count("[reference.torch-") == 7


@pytest.mark.parametrize(
    "file", ["from int8moe.testing.suite import *\n", "def test_it(int8moe_target): pass\n"], ids=["suite", "fixture"]
)
def test_a_forgotten_kernel_name_is_one_line(run, file):
    result, text = run(test_none=file)
    assert result.ret != 0
    assert "test_none: kernel = None; write" in text
    assert "--int8moe-kernel" in text
    assert "under_test.py" not in text


FAR = 'from int8moe.testing.suite import *\n\nkernel = ["far.away"]\n'

WITH_FIXTURES = """
from int8moe.testing import make_experts

kernel = ["far.here", "far.away"]

def test_name(int8moe_kernel):
    assert int8moe_kernel == "far.here"

def test_a_tail(int8moe_target):
    config = int8moe_target.config(hidden_size=65)
    experts = make_experts(config, seed=1)
    int8moe_target.check(int8moe_target.layer(config, experts), experts, int8moe_target.inputs(config, 3))
"""


def test_kernels_that_did_not_run_are_in_the_summary(run):
    result, text = run(conftest=CONFTEST, test_far=FAR)
    assert result.ret == 0, text
    assert result.parseoutcomes() == {"skipped": 1}
    assert "\nint8moe: not run: far.away: the moon is not in sight\n" in text
    assert text.count("int8moe: not run") == 1
    result, text = run("--int8moe-kernel", "reference.torch", "-k", "declaration-spec")
    assert result.parseoutcomes()["passed"] == 1
    assert "not run" not in text


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_fixtures_give_each_kernel_in_turn(run, processes):
    result, text = run(processes=processes, conftest=CONFTEST, test_mine=WITH_FIXTURES)
    assert result.ret == 0, text
    assert result.parseoutcomes() == {"passed": 2, "skipped": 2}
    made = re.search(r"^int8moe: ([0-9]+) bit-exact comparisons$", text, re.MULTILINE)
    assert made is not None
    assert int(made[1]) >= 3  # one for each number of threads, besides the self-test's
    assert "\nint8moe: not run: far.away: the moon is not in sight\n" in text


def test_a_kernel_that_is_asked_for_takes_the_place_of_the_files(run):
    result, text = run("--int8moe-kernel", "far.here", conftest=CONFTEST, test_mine=WITH_FIXTURES)
    assert result.parseoutcomes() == {"passed": 2}, text


@pytest.mark.parametrize("option", ["--int8moe-dtype=bfloat16", "--int8moe-activation=gelu", "--int8moe-shape=64x48"])
def test_a_test_of_one_s_own_that_the_options_leave_out_is_skipped(run, option):
    result, text = run(option, "-rs", conftest=CONFTEST, test_mine=WITH_FIXTURES)
    assert result.ret == 0, text
    outcomes = result.parseoutcomes()
    assert outcomes["skipped"] == (2 if "gelu" in option else 3)  # two of far.away
    assert outcomes["passed"] == 4 - outcomes["skipped"]


def test_a_run_without_kernels_says_nothing(run):
    result, text = run(test_else="def test_it(): assert True\n")
    assert result.parseoutcomes() == {"passed": 1}
    assert "int8moe:" not in text
