"""Everything that takes a device, in one script of at most six minutes: ``make gpu-check``.

The conformance suite (reduced), torch.library.opcheck, torch.compile, capture and replay of a CUDA graph, sums over the
longest rows, and a short benchmark. It installs nothing. Without a device, or without triton, it says so and ends
with 0: skipped is not passed, and the last line tells which it was.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

try:
    from int8moe_triton_gpu import probe
except ModuleNotFoundError as missing:
    sys.exit(
        f"gpu-check: {missing.name} is not installed for {sys.executable}; install torch for the device there, and "
        "then, from the checkout: pip install . ./plugins/triton_gpu"
    )

KERNEL = "triton_gpu.grouped_gemm"
SECONDS = 330
"""After that the step under way is broken off and no further one begins; both are reported, and the check fails."""

_SUITE = ("declaration", "integers", "bits", "routing", "batch", "strides", "special", "rows", "refusals", "packing")


class OutOfTimeError(BaseException):
    """SECONDS are over. No Exception, which a case of the suite would take for its own failure."""


def _end(*_: object) -> None:
    raise OutOfTimeError(f"{SECONDS} s are over")


def main() -> int:
    """Run every step; 1 when one fails or is left out."""
    os.environ.pop("TRITON_INTERPRET", None)
    reason = probe.refusal(probe.read_facts())
    if reason is not None:
        print(f"gpu-check: SKIPPED: {reason}")
        return 0
    import torch

    from int8moe_triton_gpu.devices import find_device, refusal

    if not torch.cuda.is_available():
        print("gpu-check: SKIPPED: torch finds no usable GPU (torch.cuda.is_available() is False): check the driver")
        return 0
    device = find_device(torch.device("cuda", torch.cuda.current_device()))
    reason = refusal(device)
    if reason is not None:
        print(f"gpu-check: SKIPPED: {reason}")
        return 0
    print(f"gpu-check: {device.name} ({device.architecture}), torch {torch.__version__}")
    signal.signal(signal.SIGALRM, _end)
    signal.alarm(SECONDS)
    failed = run_steps(STEPS)
    signal.alarm(0)
    print(f"gpu-check: {'FAILED: ' + ', '.join(failed) if failed else 'PASSED'}")
    return int(bool(failed))


def run_steps(steps: dict[str, Callable[[], str]]) -> list[str]:
    """Run each and say what became of it; the names of those that failed or were left out."""
    failed: list[str] = []
    over = ""
    for name, step in steps.items():
        started = time.monotonic()
        try:
            said = f"LEFT OUT: {over}" if over else step()
        except OutOfTimeError as end:
            over = str(end)
            said = f"BROKEN OFF: {over}"
        except Exception as error:
            said = f"FAILED: {type(error).__name__}: {' '.join(str(error).split())[:2000]}"
        if said.startswith(("FAILED", "BROKEN OFF", "LEFT OUT")):
            failed.append(name)
        print(f"{name}: {said} ({time.monotonic() - started:.1f} s)", flush=True)
    return failed


def self_test() -> str:
    """Bind the kernel: its known answer, on this device."""
    from int8moe.binding import bind

    bind(KERNEL)
    return "known answer is right"


def conformance() -> str:
    """The reduced suite, group by group."""
    from int8moe.testing import run_kernel
    from int8moe.testing.runner import format_group, format_result, passed

    result = run_kernel(
        KERNEL,
        grid="reduced",
        groups=_SUITE,
        threads=(1,),
        progress=lambda group: print(f"  {format_group(group)}", flush=True),
    )
    text = format_result(result, with_table=False)
    if not passed(result):
        raise AssertionError(text)
    return text


def _layer(tokens: int, **fields: Any) -> tuple[Any, Any, tuple[Any, ...], tuple[Any, ...]]:
    """A packed layer on the device, its experts, and inputs: on the CPU and there."""
    from int8moe.contracts import MoEConfig
    from int8moe.layer import FusedMoE
    from int8moe.testing import make_experts, make_hidden_states, make_routing

    config = MoEConfig(**({"num_experts": 8, "top_k": 2, "hidden_size": 256, "intermediate_size": 128} | fields))
    experts = make_experts(config)
    layer = FusedMoE(config, kernel=KERNEL, device="cuda")
    layer.load_weights(**experts.tensors())
    layer.process_weights_after_loading()
    inputs = make_hidden_states(tokens, config.hidden_size), *make_routing(tokens, config.num_experts, config.top_k)
    return layer, experts, inputs, tuple(tensor.cuda() for tensor in inputs)


def opcheck() -> str:
    """torch.library.opcheck of the operator, and the compiled layer, against the reference."""
    import torch

    from int8moe import ops
    from int8moe.testing import assert_same_bits, reference_output

    layer, experts, inputs, here = _layer(40)
    arguments = (
        *here,
        layer.w13_weight, layer.w13_weight_scale, None, layer.w2_weight, layer.w2_weight_scale, None, None, [], [],
        *ops.op_arguments(layer, KERNEL),
    )  # fmt: skip
    torch.library.opcheck(torch.ops.int8moe.fused_experts.default, arguments)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad():
        out = compiled(*here)
    assert_same_bits(out.cpu(), reference_output(layer.config, experts, *inputs), "compiled")
    return "opcheck and torch.compile(fullgraph=True) pass"


def cuda_graph() -> str:
    """Capture a forward, change the inputs and the routing in place, replay: the reference's bits."""
    import torch

    from int8moe.testing import assert_same_bits, make_hidden_states, make_routing, reference_output

    for tokens in (3, 200):
        layer, experts, _, here = _layer(tokens)
        with torch.no_grad():
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())  # which copies the inputs
            with torch.cuda.stream(side):
                layer(*here)  # compiles
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = layer(*here)
        for seed in (11, 12, 13):
            config = layer.config
            fresh = (
                make_hidden_states(tokens, config.hidden_size, seed=seed),
                *make_routing(tokens, config.num_experts, config.top_k, seed=seed),
            )
            for tensor, values in zip(here, fresh, strict=True):
                tensor.copy_(values)
            graph.replay()
            torch.cuda.synchronize()
            expected = reference_output(config, experts, *fresh)
            assert_same_bits(out.cpu(), expected, f"{tokens} tokens, replay {seed}")
    return "captured and replayed with other inputs, bit-equal"


def benchmark() -> str:
    """Microseconds of a forward of one qwen3-30b-a3b layer of random weights."""
    import torch
    import triton

    from int8moe.benchmark.shapes import SHAPES

    shape = SHAPES["qwen3-30b-a3b"]._asdict()
    shape.pop("activation"), shape.pop("has_bias")
    words = []
    for tokens in (1, 16, 256, 2048):
        layer, _, _, here = _layer(tokens, **shape)
        with torch.no_grad():
            ours = triton.testing.do_bench(lambda layer=layer, here=here: layer(*here), rep=200)
            words.append(f"M {tokens}: {1000 * ours:.0f} us")
        del layer, here
    return "qwen3-30b-a3b layer, bf16, host launches included: " + ", ".join(words)


STEPS: dict[str, Callable[[], str]] = {
    "self-test": self_test,
    "opcheck": opcheck,
    "cuda-graph": cuda_graph,
    "benchmark": benchmark,
    "conformance": conformance,
}

if __name__ == "__main__":
    sys.exit(main())
