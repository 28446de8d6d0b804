"""``int8moe generate`` and ``int8moe eval``."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from .conftest import COMMAND, Command

pytest.importorskip("transformers")

PROMPT = "def __init__(self, name, value):\n        self"


def plain_model(repository: Path, example: Path) -> Any:
    file = repository / "tests" / "integration" / "plain_qwen3_moe.py"
    spec = importlib.util.spec_from_file_location("plain_qwen3_moe", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.PlainQwen3MoE(example)


def test_greedy_tokens_are_those_of_a_plain_evaluation(int8moe: Command, example: Path, repository: Path) -> None:
    document = int8moe.json(
        "generate", str(example), "--prompt", PROMPT, "--max-new-tokens", "64", "--dtype", "float32"
    )
    wanted = plain_model(repository, example).continue_greedily(list(PROMPT.encode()), 64)  # its tokens are bytes
    assert document["tokens"] == wanted
    assert document["text"] == bytes(wanted).decode()
    assert document["prompt_tokens"] == len(PROMPT)
    assert document["kernel"]
    assert document["dtype"] == "float32"
    for name in ("prefill_tokens_per_second", "decode_tokens_per_second", "load_seconds", "peak_bytes"):
        assert document[name] > 0
    assert document["expert_bytes"] > 4 * 16 * 3 * 192 * 128  # layers, experts, projections, sizes


def test_streams_the_text_alone_on_stdout(int8moe: Command, example: Path) -> None:
    options = ("generate", str(example), "--prompt", PROMPT, "--max-new-tokens", "24")
    done = int8moe(*options)
    assert done.returncode == 0, done.stderr
    assert done.stdout == int8moe.json(*options)["text"] + "\n"
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"int8moe: 24 tokens after {len(PROMPT)}; prefill ")


def test_seed_decides_what_is_drawn(int8moe: Command, example: Path) -> None:
    def drawn(seed: str) -> Any:
        options = ("--prompt", PROMPT, "--max-new-tokens", "12", "--temperature", "1.5", "--seed", seed)
        return int8moe.json("generate", str(example), *options)["tokens"]

    assert drawn("1") == drawn("1")
    assert drawn("1") != drawn("2")


FOREIGN: list[dict[str, Any]] = [
    {"stop_strings": ["e", " "], "num_beams": 3, "num_return_sequences": 2, "early_stopping": True},
    {"do_sample": True, "temperature": 5.0, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "typical_p": 0.5},
    {"repetition_penalty": 2.0, "no_repeat_ngram_size": 1, "bad_words_ids": [[32]], "suppress_tokens": [101]},
    {"forced_eos_token_id": 7, "min_new_tokens": 2, "max_time": 1e-9, "max_new_tokens": 1, "max_length": 1},
    {"return_dict_in_generate": True, "output_scores": True, "guidance_scale": 2.0, "prompt_lookup_num_tokens": 3},
]


def with_settings(example: Path, folder: Path, **settings: Any) -> Path:
    copied = Path(shutil.copytree(example, folder))
    file = copied / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
    return copied


@pytest.fixture(scope="session")
def loaded(example: Path) -> Any:
    from int8moe.checkpoint import inspect_checkpoint
    from int8moe.cli.language_model import load_language_model

    return load_language_model(inspect_checkpoint(example), dtype="float32", quantize=False)


def tokens_of(language_model: Any, temperature: float) -> tuple[int, ...]:
    from int8moe.cli.text_generation import generate

    ids = language_model.text_input.encode(PROMPT)
    return generate(language_model, ids, max_new_tokens=12, temperature=temperature, seed=1, stream=False).tokens


@pytest.mark.parametrize("settings", FOREIGN, ids=lambda settings: next(iter(settings)))
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_settings_of_the_checkpoint_are_not_taken(
    loaded: Any, settings: dict[str, Any], temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import GenerationConfig

    wanted = tokens_of(loaded, temperature)
    own = GenerationConfig(eos_token_id=loaded.model.generation_config.eos_token_id, **settings)
    monkeypatch.setattr(loaded.model, "generation_config", own)
    assert tokens_of(loaded, temperature) == wanted
    assert loaded.model.generation_config is own


def test_the_end_of_text_of_the_checkpoint_is_taken(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tokens_of(loaded, 0.0)
    end = whole[4]
    for ends in (end, [end, 255]):
        monkeypatch.setattr(loaded.model.generation_config, "eos_token_id", ends)
        assert tokens_of(loaded, 0.0) == whole[: whole.index(end) + 1]
    for none in (None, []):
        monkeypatch.setattr(loaded.model.generation_config, "eos_token_id", none)
        assert tokens_of(loaded, 0.0) == whole


def test_a_generation_config_of_its_own_changes_nothing(int8moe: Command, example: Path, tmp_path: Path) -> None:
    changed = with_settings(
        example, tmp_path / "model", **{name: value for part in FOREIGN[:3] for name, value in part.items()}
    )
    options = ("--prompt", PROMPT, "--max-new-tokens", "12")
    wanted = int8moe.json("generate", str(example), *options)
    assert int8moe.json("generate", str(changed), *options)["tokens"] == wanted["tokens"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_lowest_temperature_draws(int8moe: Command, example: Path, dtype: str) -> None:
    options = ("--prompt", PROMPT, "--max-new-tokens", "3", "--temperature", "0.01", "--dtype", dtype)
    assert len(int8moe.json("generate", str(example), *options)["tokens"]) == 3


@pytest.mark.slow
def test_bits_per_byte_of_the_trained_model(int8moe: Command, example: Path) -> None:
    document = int8moe.json("eval", str(example), str(example / "heldout.bin"))
    assert document["bits_per_byte"] == pytest.approx(1.80432, abs=0.002)
    assert document["perplexity"] == pytest.approx(2 ** document["bits_per_byte"], rel=1e-6)  # a token is a byte
    assert document["predicted_tokens"] == 255 * 256


def test_eval_of_a_short_text(int8moe: Command, example: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("import os\nimport sys\n")
    done = int8moe("eval", str(example), str(text))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("bits per byte: ")
    assert "20 of 21 tokens predicted, 21 bytes" in done.stdout


def test_what_is_refused(int8moe: Command, example: Path, tmp_path: Path) -> None:
    too_long = int8moe.error("generate", str(example), "--prompt", "x" * 500, "--max-new-tokens", "64")
    assert too_long.startswith("500 tokens of prompt and 64 new ones are more than the 512 that the model takes")
    assert "--max-new-tokens 12" in too_long
    assert "the prompt '' has no tokens" in int8moe.error("generate", str(example), "--prompt", "")
    latin = tmp_path / "latin"
    latin.write_bytes(b"caf\xe9 au lait")
    assert "is not UTF-8 at byte 3; give a text, or --max-bytes 3" in int8moe.error("eval", str(example), str(latin))
    assert "no such directory" in int8moe.error("generate", str(tmp_path / "absent"), "--prompt", "x")
    bare = shutil.copytree(example, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    assert "its tokenizer cannot be loaded" in int8moe.error("generate", str(bare), "--prompt", "x")


def without_weights(example: Path, folder: Path) -> Path:
    """A checkpoint whose weights cannot be read to the end, though their headers can."""
    copied = Path(shutil.copytree(example, folder))
    file = copied / "model.safetensors"
    with safe_open(file, framework="pt") as tensors:
        name = next(name for name in tensors.keys() if name.endswith("weight_scale"))  # noqa: SIM118
        stored = {key: tensors.get_tensor(key) for key in tensors.keys()}  # noqa: SIM118
    stored[name] = stored[name] * float("nan")
    save_file(stored, file, {"format": "pt"})
    return copied


def test_text_is_refused_before_weights_are_read(int8moe: Command, example: Path, tmp_path: Path) -> None:
    broken = str(without_weights(example, tmp_path / "model"))
    assert "nan" in int8moe.error("generate", broken, "--prompt", "x")
    assert "the prompt '' has no tokens" in int8moe.error("generate", broken, "--prompt", "")
    assert "more than the 512" in int8moe.error("generate", broken, "--prompt", "x" * 600)
    text = tmp_path / "text.txt"
    text.write_text("x")
    assert "the text has 1 token; at least 2" in int8moe.error("eval", broken, str(text))
    assert "--window 513 is more than the 512" in int8moe.error("eval", broken, str(text), "--window", "513")


def test_a_text_that_is_none_is_refused_before_torch(
    int8moe: Command, example: Path, without_torch: Path, tmp_path: Path
) -> None:
    empty = tmp_path / "empty"
    empty.write_text("")
    assert "empty: is empty; give a text" in int8moe.error("eval", str(example), str(empty), site=without_torch)
    absent = int8moe.error("eval", str(example), str(tmp_path / "absent"), site=without_torch, status=2)
    assert "absent' does not exist" in absent


@pytest.mark.parametrize("kept", [(), ("tokenizer_config.json",), ("tokenizer.json",)])
def test_a_tokenizer_that_is_not_whole(int8moe: Command, example: Path, tmp_path: Path, kept: tuple[str, ...]) -> None:
    folder = Path(shutil.copytree(example, tmp_path / "model", ignore=shutil.ignore_patterns("tokenizer*")))
    for name in kept:
        (folder / name).write_text("{}")
    line = int8moe.error("generate", str(folder), "--prompt", "x")
    assert f"{folder}: its tokenizer cannot be loaded" in line
    assert line.endswith("; put the model's tokenizer.json and tokenizer_config.json there")
    for name in {"tokenizer.json", "tokenizer_config.json"} - set(kept):
        assert not kept or f"it holds no {name}" in line


def test_a_base_model_alone_continues_no_text(int8moe: Command, example: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(example, tmp_path / "model"))
    file = folder / "model.safetensors"
    stored = {key.removeprefix("model."): tensor for key, tensor in load_file(file).items() if "lm_head" not in key}
    save_file(stored, file, {"format": "pt"})
    line = int8moe.error("generate", str(folder), "--prompt", "x")
    assert "lacks lm_head.weight; a whole language model is wanted" in line


def test_a_reader_that_goes_ends_it_quietly(int8moe: Command, example: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "generate", str(example), "--prompt", PROMPT, "--max-new-tokens", "400"],
        env=int8moe.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.read(5)
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""  # no summary either: not all was generated
    assert process.wait(timeout=60) == 0


def test_an_untested_transformers_is_one_line(int8moe: Command, example: Path, tmp_path: Path) -> None:
    metadata = tmp_path / "transformers-4.0.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 4.0.0\n")
    line = int8moe.error("generate", str(example), "--prompt", "x", site=tmp_path)
    assert line.startswith("transformers 4.0.0 is not tested with int8moe; tested are ")
