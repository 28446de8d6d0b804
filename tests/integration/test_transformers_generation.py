"""What transformers' own tests ask of a model that generates, asked of tiny models with our experts.

The installed package ships no model tests, so these are calls of the same kind: greedy and beam search, sampling,
left padding, a cache or none, a static cache, continuing from a cache, and a reload. Left out are training, gradients
and resizing of weights, which inference does not have, and tests of devices and of attention kernels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("enabled")

SIZES = {
    "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "pad_token_id": 1, "eos_token_id": None, "bos_token_id": 0,
}  # fmt: skip
MODELS = ("qwen3_moe", "mixtral")


def tiny(name: str) -> Any:
    """A seeded float model."""
    from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    if name == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**SIZES, intermediate_size=37, num_local_experts=4)).eval()
    config = Qwen3MoeConfig(
        **SIZES, intermediate_size=40, moe_intermediate_size=16, num_experts=8, num_experts_per_tok=2, head_dim=8,
        norm_topk_prob=True,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config).eval()


@pytest.fixture(scope="module", params=MODELS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    tiny(request.param).save_pretrained(folder)
    return folder


@pytest.fixture
def model(saved: Path, enabled: None) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32, experts_implementation="int8moe")


def prompts(rows: int = 3, length: int = 7) -> torch.Tensor:
    return torch.randint(2, 99, (rows, length), generator=torch.Generator().manual_seed(2))


def generate(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    defaults = {"max_new_tokens": 10, "do_sample": False, "attention_mask": torch.ones_like(ids), "pad_token_id": 1}
    tokens: torch.Tensor = model.generate(ids, **(defaults | options))
    return tokens


def test_greedy_is_the_argmax_of_forward(model: Any) -> None:
    ids = prompts()
    wanted = ids
    with torch.no_grad():
        for _ in range(10):
            step = model(wanted, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
            wanted = torch.cat([wanted, step], dim=1)
    assert torch.equal(generate(model, ids), wanted)


def test_cache_or_none_or_static(model: Any) -> None:
    ids = prompts()
    wanted = generate(model, ids, use_cache=False)
    assert torch.equal(generate(model, ids, use_cache=True), wanted)
    static = generate(model, ids, cache_implementation="static", disable_compile=True)
    assert torch.equal(static, wanted)


def test_beams_and_samples(model: Any) -> None:
    ids = prompts()
    beams = generate(model, ids, num_beams=3, num_return_sequences=2)
    assert beams.shape == (6, 17)
    assert torch.equal(beams, generate(model, ids, num_beams=3, num_return_sequences=2))
    torch.manual_seed(7)
    first = generate(model, ids, do_sample=True, num_return_sequences=2)
    torch.manual_seed(7)
    assert torch.equal(first, generate(model, ids, do_sample=True, num_return_sequences=2))


def test_left_padding_and_batch_leave_the_tokens(model: Any) -> None:
    ids = prompts(rows=1)
    padded = torch.cat([torch.ones(1, 4, dtype=torch.int64), ids], dim=1)
    mask = torch.cat([torch.zeros(1, 4, dtype=torch.int64), torch.ones_like(ids)], dim=1)
    other = prompts(rows=1, length=11)
    batch = generate(model, torch.cat([padded, other]), attention_mask=torch.cat([mask, torch.ones_like(other)]))
    assert torch.equal(batch[:1, 4:], generate(model, ids))
    assert torch.equal(batch[1:], generate(model, other))


def test_continuing_from_a_cache(model: Any) -> None:
    ids = prompts()
    whole = generate(model, ids, max_new_tokens=8)
    first = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False, return_dict_in_generate=True
    )
    rest = generate(model, first.sequences, past_key_values=first.past_key_values, max_new_tokens=4)
    assert torch.equal(rest, whole)


def test_logits_of_a_generation_are_those_of_forward(model: Any) -> None:
    ids = prompts()
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    with torch.no_grad():
        logits = model(out.sequences[:, :-1]).logits[:, ids.shape[1] - 1 :]
    torch.testing.assert_close(torch.stack(out.logits, dim=1), logits, rtol=0, atol=1e-4)


def test_in_half_precision(saved: Path, enabled: None) -> None:
    from transformers import AutoModelForCausalLM

    for dtype in (torch.bfloat16, torch.float16):
        model = AutoModelForCausalLM.from_pretrained(saved, dtype=dtype, experts_implementation="int8moe")
        assert generate(model, prompts()).shape == (3, 17)


def test_saved_and_loaded_again(model: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(generate(again, prompts()), generate(model, prompts()))


def test_a_model_in_memory(saved: Path, model: Any) -> None:
    from transformers import AutoModelForCausalLM

    later = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    later.set_experts_implementation("int8moe")
    assert torch.equal(generate(later, prompts()), generate(model, prompts()))
