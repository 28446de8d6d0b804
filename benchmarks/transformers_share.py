"""The experts' share of time in a model of transformers: INT8 against bf16, in one run.

A synthetic model of a few layers in the shape of qwen3-30b-a3b, its weights random, runs twice: with the experts that
transformers takes by default, and with int8moe's. Time inside the experts modules is taken by hooks around their calls.
Rounds of both alternate, so that a busy machine meets both alike. The float weights stay beside the packed ones:
a layer takes 1.2 GB in bf16 and 0.6 GB in INT8.

    python benchmarks/transformers_share.py                  # 4 layers, decode and a prefill of 1024 tokens
    python benchmarks/transformers_share.py --smoke          # seconds
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from int8moe.integrations.transformers import enable
from int8moe.integrations.transformers.experts_function import packed_experts

SHAPES = {
    "qwen3-30b-a3b": {
        "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    },
    "smoke": {
        "hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    },
}  # fmt: skip


class ExpertsClock:
    """Seconds inside the experts modules of a model since the last reset."""

    def __init__(self, model: Any) -> None:
        self.seconds = 0.0
        for layer in model.model.layers:
            layer.mlp.experts.register_forward_pre_hook(self._start)
            layer.mlp.experts.register_forward_hook(self._stop)

    def _start(self, module: Any, inputs: Any) -> None:
        self._started = time.perf_counter()

    def _stop(self, module: Any, inputs: Any, output: Any) -> None:
        self.seconds += time.perf_counter() - self._started


def make_model(shape: dict[str, int], layers: int) -> Any:
    """A seeded model in bf16."""
    config = Qwen3MoeConfig(
        **shape, num_hidden_layers=layers, vocab_size=1024, intermediate_size=64, norm_topk_prob=True,
        eos_token_id=None, pad_token_id=0, dtype=torch.bfloat16,
    )  # fmt: skip
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)


def measure(model: Any, clock: ExpertsClock, ids: torch.Tensor, new_tokens: int) -> tuple[float, float]:
    """Seconds of the whole and of the experts: of a prefill, or of the tokens after the first in ``generate``."""
    if new_tokens == 0:
        clock.seconds, started = 0.0, time.perf_counter()
        model(ids, use_cache=False, logits_to_keep=1)
        return time.perf_counter() - started, clock.seconds
    results = []
    for count in (1, 1 + new_tokens):
        clock.seconds, started = 0.0, time.perf_counter()
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
        results.append((time.perf_counter() - started, clock.seconds))
    return results[1][0] - results[0][0], results[1][1] - results[0][1]


def main() -> int:
    """Run the benchmark and print one line a case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=1024, help="of the prefill")
    parser.add_argument("--new-tokens", type=int, default=16, help="of a round of decode")
    parser.add_argument("--smoke", action="store_true", help="a small model and few rounds")
    parser.add_argument("--json", type=Path, help="write all samples there")
    options = parser.parse_args()
    name = "smoke" if options.smoke else "qwen3-30b-a3b"
    if options.smoke:
        options.layers, options.rounds, options.tokens, options.new_tokens = 1, 2, 32, 2
    enable()
    model = make_model(SHAPES[name], options.layers)
    default = model.config._experts_implementation
    for layer in model.model.layers:  # packing is no part of what is timed
        kernel = packed_experts(layer.mlp.experts, SHAPES[name]["num_experts_per_tok"]).kernel.name
    clock = ExpertsClock(model)
    ids = torch.randint(0, 1024, (1, options.tokens))
    cases = {"decode": (ids[:, :16], options.new_tokens), f"prefill {options.tokens}": (ids, 0)}
    samples: dict[str, dict[str, list[tuple[float, float]]]] = {}
    with torch.inference_mode():
        for case, (given, new_tokens) in cases.items():
            samples[case] = {default: [], "int8moe": []}
            for round_ in range(options.rounds + 1):
                for implementation, kept in samples[case].items():
                    model.set_experts_implementation(implementation)
                    sample = measure(model, clock, given, new_tokens)
                    if round_:  # the first one warms up
                        kept.append(sample)
    threads = torch.get_num_threads()
    print(f"{name}, {options.layers} layers, bf16 experts {default!r} against {kernel}, {threads} threads")
    headings = ("experts bf16", "experts int8", "ratio", "model bf16", "model int8", "ratio")
    print(f"{'':<14} " + " ".join(f"{heading:>13}" for heading in headings))
    for case, kept in samples.items():
        (whole, experts), (whole_int8, experts_int8) = (
            [statistics.median(column) * 1e3 for column in zip(*kept[key], strict=True)] for key in (default, "int8moe")
        )
        columns = (
            f"{experts:.1f} ms", f"{experts_int8:.1f} ms", f"{experts / experts_int8:.2f}",
            f"{whole:.1f} ms", f"{whole_int8:.1f} ms", f"{whole / whole_int8:.2f}",
        )  # fmt: skip
        print(f"{case:<14} " + " ".join(f"{column:>13}" for column in columns))
    if options.json:
        options.json.write_text(json.dumps({"shape": name, "kernel": kernel, "default": default, "samples": samples}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
