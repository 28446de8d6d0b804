"""``int8moe bench`` on tiny layers: seconds, and no word about how fast anything is."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from plugin_folder import PluginFolder

from .conftest import COMMAND, Command

SHORT = ("--gigabytes", "1e-6", "--seconds", "0", "--rounds", "7", "--threads", "1")
TINY = ("--shape", "8,2,64,32", *SHORT)
REFERENCE = ("--kernel", "reference.torch")

DOCUMENT_FIELDS = {
    "schema", "shape", "dtype", "routing", "seed", "rounds", "seconds", "threads", "threads_source", "machine",
    "versions", "kernels", "points", "void", "overhead", "disturbance", "notes",
}  # fmt: skip
KERNEL_FIELDS = {
    "label", "kernel", "distribution", "version", "layout", "numerics", "layers", "weight_bytes", "load_seconds",
    "pack_seconds", "load_pack_gb_per_s", "reader", "read_gb_per_s", "peak_tops",
}  # fmt: skip
POINT_FIELDS = {
    "tokens", "touched_experts", "weight_bytes", "ops", "rounds", "kernels", "comparisons", "disturbance",
}  # fmt: skip
FIGURE_FIELDS = {
    "label", "median_seconds", "best_seconds", "quartile_seconds", "gb_per_s", "tops", "read_gb_per_s", "peak_tops",
    "memory_seconds", "compute_seconds", "roofline_seconds", "bound", "fraction", "fraction_void",
    "memory_fraction", "samples",
}  # fmt: skip
MACHINE_FIELDS = {"cpu", "machine", "system", "cache_bytes", "huge_pages"}

LIMITS = """
    @hookimpl
    def run_peak(self, iterations):
        return 1000 * iterations

    @hookimpl
    def read_memory(self, buffer):
        assert buffer.dtype == torch.uint8
"""


@pytest.fixture
def acme(plugins: PluginFolder) -> Path:
    """A plugin whose kernel ``acme.fast`` offers its limits."""
    plugins.add_good()
    experts = plugins.folder / "acme_plugin_experts.py"
    experts.write_text(f"import torch\n{experts.read_text()}{LIMITS}")
    return plugins.folder


def test_table(int8moe: Command) -> None:
    done = int8moe("bench", *TINY, *REFERENCE, "--tokens", "1,4")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == (
        "shape:    8,2,64,32 (8 experts, top-2, hidden 64, intermediate 32, silu), bfloat16, routing uniform"
    )
    assert lines[1].startswith("machine:  ")
    assert lines[1].endswith(", 1 thread")
    assert lines[2].startswith("kernel:   reference.torch (int8moe ")
    assert "load+pack" in lines[2]
    assert lines[3].startswith("roofline: read ")
    assert "by torch.sum" in lines[3]
    assert lines[3].endswith("peak not measured")
    header = next(line for line in lines if "median ms" in line)
    for heading in ("best ms", "middle half", "GB/s", "TOPS", "roofline ms", "of roofline", "others"):
        assert heading in header
    rows = [line.split() for line in lines if " reference.torch " in line and not line.startswith(("kernel:", "note:"))]
    assert [row[0] for row in rows] == ["1", "4"]
    assert any(line.startswith("disturbance: ") for line in lines)
    assert any("reference.torch has no run_peak" in line for line in lines if line.startswith("note: "))
    progress = done.stderr.splitlines()
    assert progress[0].startswith("int8moe: packed ")
    assert [line.split(":")[1].strip() for line in progress[1:]] == [
        "measured M = 1 (1 of 2)",
        "measured M = 4 (2 of 2)",
    ]


def test_document_on_stdout(int8moe: Command, acme: Path) -> None:
    found = int8moe.json("bench", *TINY, "--kernel", "acme.fast", "--tokens", "1-3,8", "--overhead", site=acme)
    assert set(found) == DOCUMENT_FIELDS
    assert found["schema"] == 1
    assert found["shape"]["full_num_experts"] == 8
    assert set(found["machine"]) == MACHINE_FIELDS
    assert {"int8moe", "torch", "python", "acme-kernels"} <= set(found["versions"])
    (kernel,) = found["kernels"]
    assert set(kernel) == KERNEL_FIELDS
    assert (kernel["kernel"], kernel["reader"]) == ("acme.fast", "read_memory")
    assert kernel["peak_tops"] > 0
    assert [point["tokens"] for point in found["points"]] == [1, 2, 3, 8]
    for point in found["points"]:
        assert set(point) == POINT_FIELDS
        (figures,) = point["kernels"]
        assert set(figures) == FIGURE_FIELDS
        samples = figures["samples"]
        assert len(samples["seconds"]) == point["rounds"] == 7
        assert len(samples["bandwidths"]) == len(samples["peaks"]) == 8
        assert sorted(samples["seconds"])[3] == figures["median_seconds"]
        limit = max(figures["memory_seconds"], figures["compute_seconds"])
        assert figures["fraction"] == pytest.approx(limit / figures["median_seconds"])
        assert point["comparisons"] == []
    assert found["points"][0]["touched_experts"] == 2
    assert found["points"][0]["weight_bytes"] == 2 * 3 * 64 * 32
    assert found["points"][0]["ops"] == 2 * 2 * 3 * 64 * 32
    (overhead,) = found["overhead"]
    assert overhead["reason"] == ""
    assert overhead["call_seconds"] >= overhead["best_call_seconds"] > 0
    assert found["void"] is None


def test_two_kernels_are_compared(int8moe: Command, acme: Path, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    file.write_text("old")
    arguments = ("bench", *TINY, *REFERENCE, "--kernel", "acme.fast", "--tokens", "2", "--json", str(file))
    done = int8moe(*arguments, site=acme)
    assert done.returncode == 0, done.stderr
    assert "acme.fast / reference.torch" in done.stdout
    assert done.stdout.splitlines()[-1] == f"JSON: {file}"
    found = json.loads(file.read_text())
    assert [kernel["kernel"] for kernel in found["kernels"]] == ["reference.torch", "acme.fast"]
    (row,) = found["points"][0]["comparisons"]
    first, second = (side["median_seconds"] for side in found["points"][0]["kernels"])
    assert (row["label"], row["to"], row["noise_check"], row["void"]) == ("acme.fast", "reference.torch", False, None)
    assert row["ratio"] == pytest.approx(second / first)
    assert list(tmp_path.glob(".*")) == []


def test_a_kernel_against_itself(int8moe: Command, tmp_path: Path) -> None:
    """Whether it is void depends on the machine; that the exit status and the words say so does not."""
    file = tmp_path / "out.json"
    done = int8moe("bench", *TINY, *REFERENCE, *REFERENCE, "--tokens", "2", "--json", str(file))
    found = json.loads(file.read_text())
    (row,) = found["points"][0]["comparisons"]
    assert (row["label"], row["to"], row["noise_check"]) == ("reference.torch (2)", "reference.torch", True)
    assert row["void"] == found["void"] == (max(row["ratio"], 1 / row["ratio"]) > 1.05)
    assert done.returncode == int(found["void"])
    text = "void: A/A differs by more than 5 %"
    assert (text in done.stdout) == (text in done.stderr) == found["void"]


def test_plot(int8moe: Command, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "out.PNG"
    done = int8moe("bench", *TINY, *REFERENCE, "--tokens", "1,4", "--plot", str(file))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"plot: {file}"
    assert file.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert list(tmp_path.iterdir()) == [file]


def test_without_matplotlib(int8moe: Command, tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ImportError('not here')\n")
    text = int8moe.error("bench", *TINY, "--plot", str(tmp_path / "out.svg"), site=tmp_path)
    assert text == "--plot needs matplotlib (not here); in a checkout of int8moe: pip install '.[plot]'"


def test_a_document_on_stdout_stays_one_with_a_plot(int8moe: Command, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "out.svg"
    done = int8moe("bench", *TINY, *REFERENCE, "--tokens", "1", "--plot", str(file), "--json", "-")
    assert done.returncode == 0, done.stderr
    assert ElementTree.parse(file).getroot().tag.endswith("svg")
    assert set(json.loads(done.stdout)) == DOCUMENT_FIELDS
    assert "int8moe: plot: " in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--shape", "mixtral"], "did you mean mixtral-8x7b"),
        (["--shape", "8,2,64"], "four numbers"),
        (["--num-experts", "1"], "give 8 to 128"),
        (["--tokens", "0"], "give 1 to 65536 tokens"),
        (["--tokens", "4-1"], "smaller number first"),
        (["--tokens", "x"], "'x' is not a number of tokens"),
        (["--tokens", "1-9999"], "more than 256 points"),
        (["--threads", "0"], "CPUs; give 1 to"),
        (["--threads", "99999"], "CPUs; give 1 to"),
        (["--dtype", "int8"], "is none of bfloat16, float16, float32"),
        (["--activation", "relu"], "is none of silu"),
        (["--routing", "two"], "uniform"),
        (["--rounds", "6"], "7<=x"),
        (["--gigabytes", "0"], "0<x"),
        (["--plot", "out.pdf"], "has to end in .svg or .png"),
        (["--plot", "nowhere/out.svg"], "there is no folder"),
        (["--json", "nowhere/out.json"], "make it first"),
        (["--json", "/dev/null"], "not an ordinary file"),
        (["--json", "."], "is a folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_is_told_before_anything_is_measured(int8moe: Command, arguments: list[str], said: str) -> None:
    assert said in int8moe.error("bench", *arguments, status=2)


def test_errors(int8moe: Command, acme: Path) -> None:
    assert "did you mean reference.torch?" in int8moe.error("bench", "--kernel", "reference.troch")
    refused = int8moe.error("bench", *TINY, "--kernel", "acme.fast", "--activation", "relu2_no_mul", site=acme)
    assert "acme.fast" in refused
    assert "relu2_no_mul" in refused


def test_more_than_the_memory(int8moe: Command) -> None:
    shape = ("--shape", "1000000,2,4096,4096", *REFERENCE)
    text = int8moe.error("bench", *shape)
    assert "1 layer of 50380.8 GB" in text
    assert "GB are available. Give --num-experts " in text
    text = int8moe.error("bench", "--shape", "smoke", "--gigabytes", "9000", *REFERENCE)
    assert "GB are available. Give --gigabytes " in text


def test_fewer_experts_are_reported(int8moe: Command) -> None:
    found: Any = int8moe.json("bench", "--shape", "smoke", "--num-experts", "4", *SHORT, *REFERENCE, "--tokens", "1")
    assert (found["shape"]["num_experts"], found["shape"]["full_num_experts"]) == (4, 16)
    assert "4 of the 16 experts of smoke" in found["notes"]


def test_biases_and_the_activation_of_a_model(int8moe: Command) -> None:
    """gpt-oss needs both; numbers take what is asked for."""
    found = int8moe.json("bench", "--shape", "gpt-oss-20b", "--num-experts", "4", *SHORT, "--tokens", "1")
    assert (found["shape"]["activation"], found["shape"]["has_bias"]) == ("swigluoai", True)
    found = int8moe.json("bench", *TINY, *REFERENCE, "--activation", "gelu", "--tokens", "1", "--routing", "one")
    assert (found["shape"]["activation"], found["routing"]) == ("gelu", "one")


def test_interrupt_leaves_nothing(int8moe: Command, tmp_path: Path) -> None:
    files = ("--json", str(tmp_path / "out.json"))
    process = subprocess.Popen(
        [*COMMAND, "bench", "--shape", "8,2,64,32", "--gigabytes", "1e-6", "--seconds", "3600", *REFERENCE, *files],
        env=int8moe.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("int8moe: packed"):
            break
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout, stderr) == (130, "", "")
    assert list(tmp_path.iterdir()) == []
