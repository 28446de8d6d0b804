"""``int8moe eval``: how well a checkpoint predicts a text."""

from __future__ import annotations

from pathlib import Path

import click

from .generate import DTYPES
from .output import Verb, write, write_json
from .signals import import_torch


@click.command("eval", cls=Verb)
@click.argument("checkpoint")
@click.argument("textfile", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--window",
    type=click.IntRange(2, 1_000_000),
    default=256,
    show_default=True,
    help="Tokens that the model sees at a time; each window starts afresh.",
)
@click.option("--max-bytes", type=click.IntRange(2), metavar="N", help="Take only the first N bytes of the text.")
@click.option("--dtype", type=click.Choice(DTYPES), default="auto", show_default=True, help="Of all but the experts.")
@click.option("--quantize", is_flag=True, help="Quantise the experts that the checkpoint leaves unquantised.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(
    checkpoint: str,
    textfile: Path,
    window: int,
    max_bytes: int | None,
    dtype: str,
    quantize: bool,
    as_json: bool,
) -> int:
    """Measure bits per byte and perplexity of a text (UTF-8), with the experts in INT8.

    The model runs in transformers (the extra [transformers]). The text is cut into windows; from each
    token and those before it in its window the next one is predicted. A rest shorter than a window is left out.
    Lower is better; bits per byte can be compared between models with other tokenizers. INT8MOE_KERNEL names a
    kernel.
    """
    from ..errors import UnsupportedInputError
    from .sources import open_source

    plan = open_source(checkpoint, layers=None, quantize=quantize).plan
    assert plan is not None
    data = textfile.read_bytes()[:max_bytes]
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UnsupportedInputError(
            f"{textfile}: is not UTF-8 at byte {error.start}; give a text, or --max-bytes {error.start} to end there"
        ) from None
    if not text:
        raise UnsupportedInputError(f"{textfile}: is empty; give a text of two tokens or more")
    import_torch()
    from .language_model import load_language_model
    from .text_input import load_text_input
    from .text_quality import encode_text, measure

    text_input = load_text_input(plan.path)
    ids = encode_text(text_input, text, window)
    model = load_language_model(plan, dtype=dtype, quantize=quantize, text_input=text_input)
    quality = measure(model, ids, num_bytes=len(data), window=window)
    kernel = ", ".join(model.kernels)
    if as_json:
        write_json(
            {
                "schema": 1,
                "checkpoint": str(plan.path),
                "text": str(textfile),
                "kernel": kernel,
                "dtype": model.dtype,
                "window": window,
                "bytes": quality.num_bytes,
                "tokens": quality.num_tokens,
                "predicted_tokens": quality.num_predicted,
                "bits_per_byte": quality.bits_per_byte,
                "perplexity": quality.perplexity,
                "seconds": quality.seconds,
                "tokens_per_second": quality.num_tokens / quality.seconds,
            }
        )
    else:
        write(f"bits per byte: {quality.bits_per_byte:.5f}")
        write(f"perplexity:    {quality.perplexity:.4f} a token")
        write(
            f"{quality.num_predicted} of {quality.num_tokens} tokens predicted, {quality.num_bytes} bytes, windows of "
            f"{window}; {quality.num_tokens / quality.seconds:.0f} tokens/s, kernel {kernel}, {model.dtype}"
        )
    return 0
