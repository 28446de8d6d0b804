"""The cross-built wheel on an emulated s390x: what is listed, the bits of the reference, offsets beyond 2^31."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from s390x_machine import MODELS, Machine, missing_tools

from int8moe.testing.case import Grid
from int8moe.testing.groups.bits import grid_layers

HERE = Path(__file__).parent
CHECK_OBJECTS = HERE.parents[1] / "checks" / "check_objects.py"

DATA_EXCEPTION = -8  # SIGFPE, for a vector instruction without the facility
LAYERS_OF_A_FILE = 96

# Run where the library is: for each tier the products of 0, 1 and 3 rounds of its fastest loop, and what reading a buffer
# with one odd byte finds.
LIMITS = """
import numpy, sys
from int8moe_s390x_vxe.library import LIBRARY
library = LIBRARY.load()
buffer = numpy.zeros(1000, dtype=numpy.uint8)
buffer[999] = 7
for tier in map(LIBRARY.tier_index, sys.argv[1:]):
    peaks = (library.int8moe_run_peak(tier, 1, n) for n in (0, 1, 3))
    print(*peaks, library.int8moe_read_memory(tier, 1, buffer.ctypes.data, 1000))
"""


@pytest.fixture(scope="module")
def machine() -> Machine:
    machine = Machine()
    if not machine.exists:
        pytest.skip("no emulated machine has been made here: run make s390x")
    if reason := missing_tools():
        pytest.skip(reason)
    machine.prepare()
    return machine


@pytest.fixture(scope="module")
def grid(request: pytest.FixtureRequest) -> Grid:
    return request.config.getoption("int8moe_grid") or "reduced"


def write_cases(path: Path, grid: Grid, first: int) -> Path:
    """The cases of some layers of a grid."""
    span = ("--first", str(first), "--last", str(first + LAYERS_OF_A_FILE))
    command = [sys.executable, str(HERE / "write_cases.py"), str(path), "--grid", grid, *span]
    subprocess.run(command, check=True, capture_output=True)
    return path


@pytest.fixture(scope="module")
def first_cases(machine: Machine, grid: Grid, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cases(tmp_path_factory.mktemp("cases") / "first.npz", grid, 0)


@pytest.fixture
def all_cases(first_cases: Path, grid: Grid, tmp_path: Path) -> Iterator[Path]:
    """The cases of the grid, a file of some layers at a time."""

    def files() -> Iterator[Path]:
        yield first_cases
        for first in range(LAYERS_OF_A_FILE, sum(1 for _ in grid_layers(grid)), LAYERS_OF_A_FILE):
            path = write_cases(tmp_path / f"{first}.npz", grid, first)
            yield path
            path.unlink()

    return files()


@pytest.mark.parametrize("model", MODELS)
def test_every_kernel_is_listed_with_its_reason(machine: Machine, model: str):
    run = machine.run(model, "-m", "int8moe", "list-kernels", "--json")
    assert run.returncode == 0, run.stderr
    listed = json.loads(run.stdout)
    assert all(plugin["state"] == "loaded" for plugin in listed["plugins"]), listed["plugins"]
    reasons = {k["name"]: k["reason"] for k in listed["kernels"] if not k["available"]}
    available = {k["name"] for k in listed["kernels"] if k["available"]}
    usable = MODELS[model].tiers
    assert available - {"reference.torch"} == {f"s390x_vxe.{tier}" for tier in usable}
    no_vx = "the vector facility (vx) is not there, or not enabled by the system"
    no_vxe = "the CPU has no vector-enhancements facility 1 (vxe)"
    expected = {"vx": no_vx, "vxe": no_vxe if "vx" in usable else no_vx}
    assert reasons == {f"s390x_vxe.{tier}": why for tier, why in expected.items() if tier not in usable}


def test_every_call_has_the_bits_of_the_reference(machine: Machine, all_cases: Iterator[Path]):
    """Each tier on the least machine that has it."""
    least: dict[str, str] = {}
    for model in reversed(MODELS):
        for tier in MODELS[model].tiers:
            least.setdefault(tier, model)
    assert least == {"scalar": "no-vx", "vx": "z13", "vxe": "z14"}
    for path in all_cases:
        for tier, model in least.items():
            run = machine.run(model, HERE / "check_cases.py", path, tier, timeout=3600)
            assert run.returncode == 0, run.stdout + run.stderr
            assert run.stdout.endswith(" calls, 0 faults\n")
            assert int(run.stdout.split()[1]) >= 4 * 32


def test_a_wrong_bit_and_a_wrong_byte_are_noticed(machine: Machine, first_cases: Path, tmp_path: Path):
    with np.load(first_cases) as file:
        arrays = {name: file[name] for name in file.files if name.startswith(("0/", "1/"))}
        index = json.loads(str(file["index"]))[:2]
    arrays["0/0/expected"].view(np.uint32)[8, 2047] ^= 1
    arrays["1/w2_packed"][0, 5] ^= 1
    wrong = tmp_path / "wrong.npz"
    np.savez(wrong, index=np.array(json.dumps(index)), **arrays)
    run = machine.run("z14", HERE / "check_cases.py", wrong, "vxe")
    assert run.returncode == 1
    first, second, summary = run.stdout.splitlines()
    assert first.startswith("vxe extreme-rows, call 0 as it is: row 8 column 2047: found 0x")
    assert first.endswith("(1 differ)")
    assert second == "vxe full-weight-range: packing does not give the bytes of packing.py"
    assert summary.endswith(" calls, 2 faults")


def test_offsets_beyond_two_to_the_31(machine: Machine):
    run = machine.run("z14", HERE / "check_offsets.py", *MODELS["z14"].tiers)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.splitlines() == [f"{tier}: same bits beyond 2^31" for tier in MODELS["z14"].tiers]


def test_a_vector_tier_needs_what_the_probe_asks_for(machine: Machine):
    run = machine.run("no-vx", "-c", LIMITS, "vx")
    assert run.returncode == DATA_EXCEPTION


def test_limits_can_be_measured(machine: Machine):
    tiers = MODELS["z14"].tiers
    run = machine.run("z14", "-c", LIMITS, *tiers)
    assert run.returncode == 0, run.stderr
    measured = [tuple(map(int, line.split())) for line in run.stdout.splitlines()]
    assert len(measured) == len(tiers)
    for none, once, thrice, found in measured:
        assert none == 0
        assert once > 0
        assert thrice == 3 * once
        assert found == 7


def test_each_unit_keeps_to_its_machine(machine: Machine):
    run = subprocess.run([sys.executable, str(CHECK_OBJECTS), str(machine.objects)], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
