"""``int8moe generate``: a checkpoint continues a text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from .number import Temperature
from .output import Verb, say, write_json
from .signals import import_torch

if TYPE_CHECKING:
    from .text_generation import Generation

DTYPES = ("auto", "bfloat16", "float16", "float32")


@click.command("generate", cls=Verb)
@click.argument("checkpoint")
@click.option("--prompt", required=True, metavar="TEXT", help="The text to continue.")
@click.option("--max-new-tokens", type=click.IntRange(1, 1_000_000), default=64, show_default=True, help="At most.")
@click.option(
    "--temperature",
    type=Temperature(),
    default=0.0,
    show_default=True,
    help="From 0.01: draw tokens at random, the more evenly the higher. 0: the likeliest token.",
)
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Of what is drawn.")
@click.option("--dtype", type=click.Choice(DTYPES), default="auto", show_default=True, help="Of all but the experts.")
@click.option("--quantize", is_flag=True, help="Quantise the experts that the checkpoint leaves unquantised.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(
    checkpoint: str,
    prompt: str,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    dtype: str,
    quantize: bool,
    as_json: bool,
) -> int:
    """Continue a text with a whole model, its experts in INT8.

    The model runs in transformers (the extra [transformers]). The continuation streams to stdout; the speed goes
    to stderr. INT8MOE_KERNEL names a kernel.
    """
    from .sources import open_source

    plan = open_source(checkpoint, layers=None, quantize=quantize).plan
    assert plan is not None
    import_torch()
    from .language_model import load_language_model
    from .text_generation import encode_prompt, generate
    from .text_input import load_text_input

    text_input = load_text_input(plan.path)
    ids = encode_prompt(text_input, prompt, max_new_tokens)
    model = load_language_model(plan, dtype=dtype, quantize=quantize, text_input=text_input)
    result = generate(model, ids, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, stream=not as_json)
    if as_json:
        write_json(
            {
                "schema": 1,
                "checkpoint": str(plan.path),
                "kernel": ", ".join(model.kernels),
                "dtype": model.dtype,
                "prompt": prompt,
                "text": result.text,
                "tokens": list(result.tokens),
                "prompt_tokens": result.prompt_tokens,
                "prefill_seconds": result.prefill_seconds,
                "prefill_tokens_per_second": result.prefill_rate,
                "decode_seconds": result.decode_seconds,
                "decode_tokens_per_second": result.decode_rate,
                "load_seconds": model.load_seconds,
                "expert_bytes": model.expert_bytes,
                "peak_bytes": model.peak_bytes,
            }
        )
    else:
        say(_summary(result, ", ".join(model.kernels)))
    return 0


def _summary(result: Generation, kernel: str) -> str:
    decode = "" if result.decode_rate is None else f", decode {result.decode_rate:.1f} tokens/s"
    return (
        f"{len(result.tokens)} tokens after {result.prompt_tokens}; "
        f"prefill {result.prefill_rate:.1f} tokens/s{decode}; kernel {kernel}"
    )
