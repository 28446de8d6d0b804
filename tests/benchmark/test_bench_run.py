"""Layers, limits and rounds with kernels that count what is asked of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from measured_kernels import QUIET, Limited, Plain, Provider, point

from int8moe import Int8MoEError, MoEConfig, hookimpl, register_kernel
from int8moe.benchmark.inputs import PointInputs
from int8moe.benchmark.layers import LayerSet, check_memory, layer_count, make_layers, random_pool
from int8moe.benchmark.limits import TORCH_READER, Limits, make_buffer
from int8moe.benchmark.measure import Side, measure_point
from int8moe.benchmark.report import document
from int8moe.benchmark.request import Request
from int8moe.benchmark.roofline import expert_bytes
from int8moe.benchmark.run import Benchmark, Results
from int8moe.benchmark.shapes import Shape
from int8moe.binding import BoundKernel, bind
from int8moe.cli.bench_table import fraction_text
from int8moe.registry import get_registry

SHAPE = Shape(4, 2, 64, 32)
CONFIG = MoEConfig(**SHAPE._asdict(), hidden_dtype="bfloat16")
MIB = 1 << 20


class Silent:
    def begin(self, name: str) -> None: ...

    def advance(self, nbytes: int) -> None: ...

    def tick(self, done: float) -> None: ...

    def end(self, text: str = "") -> None: ...


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    register_kernel(Provider(limited=Limited, plain=Plain))
    Limited.reads.clear()
    Limited.bursts.clear()
    yield
    get_registry().unregister("live")


def layers(kernel: BoundKernel, count: int = 2) -> LayerSet:
    return make_layers(CONFIG, kernel, count, random_pool(CONFIG), Silent())


def test_layers_are_packed_and_full_of_different_weights() -> None:
    found = layers(bind("live.plain"))
    assert found.nbytes == 2 * 4 * expert_bytes(CONFIG)
    weights = torch.cat([layer.w13_weight.flatten() for layer in found.layers])
    assert weights.unique().numel() == 256  # -128 to 127 all appear
    experts = [expert for layer in found.layers for expert in layer.w2_weight]
    assert not torch.equal(experts[0], experts[1])
    assert found.load_seconds > 0
    assert found.pack_seconds > 0


def test_how_many_layers() -> None:
    one = 4 * expert_bytes(CONFIG) / 1e9
    assert [layer_count(CONFIG, one * share) for share in (0.01, 1.0, 2.4, 2.6)] == [1, 1, 2, 3]


def refusal(available: int, *, count: int, kernels: int = 1) -> str:
    config = MoEConfig(num_experts=64, top_k=4, hidden_size=1024, intermediate_size=1024)
    bound = [bind("live.plain"), bind("live.limited")][:kernels]
    try:
        check_memory(config, bound, count, buffer_bytes=64 * MIB, tokens=1, available=available)
    except Int8MoEError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kernels", [1, 2])
def test_memory_that_suffices_for_fewer_layers(kernels: int) -> None:
    """201 MB of weights a layer; what the error advises is taken, and a layer more is not."""
    text = refusal(2_000_000_000, count=20, kernels=kernels)
    assert "20 layers of 0.2 GB" in text
    assert "2.0 GB are available. Give --gigabytes " in text
    advised = float(text.split("--gigabytes ")[1].split()[0])
    fewer = int(advised * 1e9 / (64 * 3 * 1024 * 1024))
    assert fewer >= 1
    assert refusal(2_000_000_000, count=fewer, kernels=kernels) == ""
    assert refusal(2_000_000_000, count=fewer + 2, kernels=kernels) != ""


def test_memory_that_does_not_suffice_for_one_layer() -> None:
    assert "Not even 4 experts fit" in refusal(1_000_000, count=1)
    config = MoEConfig(num_experts=64, top_k=4, hidden_size=1024, intermediate_size=1024)
    advised = int(refusal(500_000_000, count=1).split("--num-experts ")[1].split()[0])
    for experts, fits in ((advised, True), (advised + 1, False)):
        reduced = config.model_copy(update={"num_experts": experts})
        try:
            check_memory(reduced, [bind("live.plain")], 1, buffer_bytes=64 * MIB, tokens=1, available=500_000_000)
        except Int8MoEError:
            assert not fits
        else:
            assert fits


def test_unknown_memory_refuses_nothing() -> None:
    check_memory(CONFIG, [bind("live.plain")], 10**9, buffer_bytes=1, tokens=1, available=None)


def test_reads_go_round_the_buffer() -> None:
    """Pieces of 48 MiB and of the least size in a buffer of 128 MiB: none begins where the last one lay."""
    buffer = make_buffer(128 * MIB)
    limits = Limits(bind("live.limited"), buffer)
    for nbytes in (48 * MIB, 1, 48 * MIB, 10**12):
        assert limits.bandwidth(nbytes) > 0
    start = buffer.data_ptr()
    assert [(address - start, length) for address, length in Limited.reads] == [
        (0, 48 * MIB), (48 * MIB, 32 * MIB), (80 * MIB, 48 * MIB), (0, 128 * MIB),
    ]  # fmt: skip
    assert limits.reader == "read_memory"


def test_a_burst_has_the_operations_of_a_call_within_bounds() -> None:
    limits = Limits(bind("live.limited"), make_buffer(1))
    fewest = Limited.bursts[-1]
    for ops in (1, 2 * 1000 * fewest * 5, 10**30):
        peak = limits.peak(ops)
        assert peak is not None
        assert peak > 0
    least, matched, most = Limited.bursts[-3:]
    assert (least, matched) == (fewest, 5 * fewest)
    assert matched < most < 10**27


def test_a_kernel_without_limits() -> None:
    limits = Limits(bind("live.plain"), make_buffer(1))
    assert limits.reader == TORCH_READER
    assert limits.bandwidth(1) > 0
    assert limits.peak(1) is None


@pytest.mark.parametrize("answer", [None, 0, -1, 2.5, "1"])
def test_a_peak_that_is_no_count(answer: Any) -> None:
    class Wrong(Limited):
        @hookimpl
        def run_peak(self, iterations: int) -> int:
            return answer  # type: ignore[no-any-return]

    get_registry().unregister("live")
    register_kernel(Provider(wrong=Wrong))
    with pytest.raises(
        Int8MoEError, match=r"kernel 'live.wrong': run_peak\(1\) returned .*; it has to return how many"
    ):
        Limits(bind("live.wrong"), make_buffer(1))


def test_a_hook_that_fails_is_named() -> None:
    class Broken(Limited):
        @hookimpl
        def read_memory(self, buffer: torch.Tensor) -> None:
            raise RuntimeError("no such port")

    get_registry().unregister("live")
    register_kernel(Provider(broken=Broken))
    limits = Limits(bind("live.broken"), make_buffer(1))
    with pytest.raises(Int8MoEError, match="'live.broken': its hook read_memory failed: RuntimeError: no such port"):
        limits.bandwidth(1)


def test_rounds_alternate_and_lie_between_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = {name: bind(f"live.{name}") for name in ("limited", "plain")}
    calls: list[tuple[str, int]] = []
    sides = []
    for name, kernel in bound.items():
        made = layers(kernel)
        for number, layer in enumerate(made.layers):
            packed = layer.kernel.apply

            def noted(*arguments: Any, key: Any = (name, number), apply: Any = packed) -> None:
                calls.append(key)
                apply(*arguments)

            own = BoundKernel(get_registry().find(kernel.name), kernel.implementation)
            own.apply = noted
            monkeypatch.setattr(layer, "kernel", own)
        sides.append(Side(kernel.name, made, Limits(kernel, make_buffer(1))))
    Limited.reads.clear()
    shares: list[float] = []
    found = measure_point(sides, PointInputs(CONFIG, 3), rounds=7, seconds=0, tick=shares.append)
    names = [name for name, _ in calls]
    assert len(calls) == 2 * (1 + 7)  # one round to warm up
    assert names[:4] == ["limited", "plain", "plain", "limited"]
    assert [number for name, number in calls if name == "plain"] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert [len(side.seconds) for side in found.sides] == [7, 7]
    assert [len(side.bandwidths) for side in found.sides] == [8, 8]
    assert [len(side.peaks) for side in found.sides] == [8, 0]
    assert len(Limited.reads) == 1 + 8
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert found.work.tokens == 3


def test_a_point_goes_on_for_its_time() -> None:
    kernel = bind("live.plain")
    side = Side("x", layers(kernel), Limits(kernel, make_buffer(1)))
    found = measure_point([side], PointInputs(CONFIG, 1), rounds=7, seconds=0.5)
    assert len(found.sides[0].seconds) > 7


def test_the_same_kernel_twice_shares_layers_and_never_meets() -> None:
    benchmark = Benchmark(Request("x", SHAPE, 4, kernels=("live.limited",) * 2, gigabytes=1e-4))
    benchmark.load(Silent())
    first, second = benchmark.sides
    assert (first.label, second.label) == ("live.limited", "live.limited (2)")
    assert first.layers is second.layers
    assert first.limits is second.limits
    count = len(first.layers.layers)
    assert count == layer_count(CONFIG, 1e-4) == 4
    assert (second.offset - first.offset) % count == 2
    assert benchmark.weight_bytes == first.layers.nbytes


def test_the_document_holds_what_the_samples_say() -> None:
    """Two kernels, one without a peak; every figure is worked out by hand."""
    benchmark = Benchmark(
        Request("tiny", SHAPE, 8, tokens=(1,), kernels=("live.limited", "live.plain"), gigabytes=1e-4)
    )
    benchmark.load(Silent())
    samples = point((2e-3, 4e-3, 3e-3), (6e-3, 6e-3, 6e-3), weight_bytes=2_000_000, ops=6_000_000, bandwidths=(1e9,))
    with_peak = samples.sides[0]._replace(peaks=(2e9,))
    samples = samples._replace(sides=(with_peak, samples.sides[1]._replace(peaks=())))
    found = json.loads(
        json.dumps(document(benchmark, Results((samples,), QUIET, {"live.plain": "too small"}), threads=2))
    )
    assert found["schema"] == 1
    assert found["shape"] == {"name": "tiny", **SHAPE._asdict(), "full_num_experts": 8}
    assert found["threads"] == 2
    first, second = found["kernels"]
    assert (first["reader"], first["peak_tops"], first["layout"]) == ("read_memory", 0.002, "canonical")
    assert (second["reader"], second["peak_tops"], second["read_gb_per_s"]) == (TORCH_READER, None, 1.0)
    (at,) = found["points"]
    assert (at["tokens"], at["rounds"], at["weight_bytes"], at["ops"]) == (1, 3, 2_000_000, 6_000_000)
    limited, plain = at["kernels"]
    assert (limited["median_seconds"], limited["best_seconds"]) == (3e-3, 2e-3)
    assert (limited["memory_seconds"], limited["compute_seconds"]) == (2e-3, 3e-3)
    assert (limited["bound"], limited["fraction"]) == ("compute", 1.0)
    assert (plain["bound"], plain["fraction"]) == (None, None)
    assert plain["memory_fraction"] == pytest.approx(1 / 3)
    assert limited["samples"] == {"seconds": [2e-3, 4e-3, 3e-3], "bandwidths": [1e9], "peaks": [2e9]}
    (row,) = at["comparisons"]
    assert (row["label"], row["to"], row["ratio"]) == ("live.plain", "live.limited", 2.0)
    assert found["void"] is None
    assert found["disturbance"]["disturbed"] is False
    assert found["overhead"] == [
        {"kernel": "live.plain", "call_seconds": None, "best_call_seconds": None, "hook_seconds": None,
         "reason": "too small"}
    ]  # fmt: skip
    assert found["notes"][0] == "4 of the 8 experts of tiny"
    assert any("live.plain has no run_peak" in note for note in found["notes"])
    assert not any("live.limited has no run_peak" in note for note in found["notes"])


@pytest.mark.parametrize(("seconds", "void"), [(0.5, True), (0.74, True), (0.8, False), (1.0, False)])
def test_fractions_that_cannot_be_are_noted_and_void(
    seconds: float, void: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from int8moe.benchmark import report

    benchmark = Benchmark(Request("tiny", SHAPE, 4, tokens=(1,), kernels=("live.limited",), gigabytes=1e-4))
    benchmark.load(Silent())
    fast = point((seconds,), weight_bytes=1000, ops=1000, bandwidths=(1000.0,), peaks=(1000.0,))
    machine = report.this_machine()
    monkeypatch.setattr(report, "this_machine", lambda: machine._replace(cache_bytes=1))
    found = document(benchmark, Results((fast,), QUIET, {}), threads=1)
    (side,) = found["points"][0]["kernels"]
    assert side["fraction_void"] == void
    assert fraction_text(side) == (f"void ({1 / seconds:.2f})" if void else f"{1 / seconds:.2f}")
    assert any("fractions above 1" in note and "above 1.3 they are void" in note for note in found["notes"]) == (
        seconds < 1
    )
    # What stays in a cache is read faster than memory: such a fraction says so, and is not void.
    monkeypatch.setattr(report, "this_machine", lambda: machine._replace(cache_bytes=1 << 40))
    found = document(benchmark, Results((fast,), QUIET, {}), threads=1)
    assert not found["points"][0]["kernels"][0]["fraction_void"]
    assert any("may stay in the cache" in note for note in found["notes"])


@pytest.mark.parametrize("start_up", [0.0, 5e-5, 0.02])
def test_the_peak_does_not_count_the_start_of_threads(monkeypatch: pytest.MonkeyPatch, start_up: float) -> None:
    """A kernel that does 10**9 multiply-adds a second, after a start that is long on a busy machine, on a false clock."""
    now = 0.0

    class Timed(Limited):
        @hookimpl
        def run_peak(self, iterations: int) -> int:
            nonlocal now
            now += start_up + iterations * 1e-6
            return 1000 * iterations

    get_registry().unregister("live")
    register_kernel(Provider(timed=Timed))
    kernel, buffer = bind("live.timed"), make_buffer(1)
    monkeypatch.setattr("int8moe.benchmark.limits.time.perf_counter", lambda: now)
    peak = Limits(kernel, buffer).peak(10**9)
    assert peak == pytest.approx(2e9, rel=0.25)
