"""Switching the integration on and off: nothing of transformers stays changed, and other versions are refused."""

from __future__ import annotations

import importlib.metadata
import threading
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from transformers import modeling_utils  # noqa: E402
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # noqa: E402
from transformers.quantizers import auto  # noqa: E402

from int8moe.errors import ConfigError  # noqa: E402
from int8moe.integrations.transformers import TESTED_VERSIONS, disable, enable, is_enabled  # noqa: E402


def state() -> dict[str, Any]:
    """Everything global in transformers that loading and running experts goes through."""
    from transformers import conversion_mapping

    return {
        "functions": dict(type(ALL_EXPERTS_FUNCTIONS)._global_mapping),
        "local functions": dict(ALL_EXPERTS_FUNCTIONS._local_mapping),
        "quantizers": dict(auto.AUTO_QUANTIZER_MAPPING),
        "quantization configs": dict(auto.AUTO_QUANTIZATION_CONFIG_MAPPING),
        "conversions": set(conversion_mapping._MODEL_TO_CONVERSION_PATTERN.items()),
        "modeling": dict(vars(modeling_utils)),
        "auto": dict(vars(auto)),
    }


@pytest.fixture(autouse=True)
def off() -> Any:
    disable()
    yield
    disable()


def test_disable_puts_everything_back() -> None:
    before = state()
    enable()
    assert is_enabled()
    changed = {name for name, value in state().items() if value != before[name]}
    assert changed == {"functions", "modeling"}
    disable()
    assert not is_enabled()
    assert state() == before


def test_both_are_idempotent() -> None:
    before = state()
    enable()
    during = state()
    enable()
    assert state() == during
    disable()
    assert state() == before
    disable()
    assert state() == before


def test_context_manager_undoes_its_own_call_only() -> None:
    with enable():
        assert is_enabled()
        with enable():
            pass
        assert is_enabled()
    assert not is_enabled()
    with pytest.raises(RuntimeError, match="inside"), enable():
        raise RuntimeError("inside")
    assert not is_enabled()


def test_threads() -> None:
    before = state()
    barrier = threading.Barrier(8)

    def work() -> None:
        barrier.wait()
        for _ in range(200):
            enable()
            disable()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    disable()
    assert state() == before


def test_a_wrapper_of_somebody_else_stays_and_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    original = modeling_utils.get_hf_quantizer
    enable()
    ours = modeling_utils.get_hf_quantizer
    monkeypatch.setattr(modeling_utils, "get_hf_quantizer", lambda *args, **kwargs: ours(*args, **kwargs))
    disable()
    assert modeling_utils.get_hf_quantizer is not ours
    config = transformers.Qwen3MoeConfig()
    assert modeling_utils.get_hf_quantizer(config, None, None, True, {}) == original(config, None, None, True, {})


def test_an_untested_version_is_refused_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "4.57.6")
    with pytest.raises(
        ConfigError, match=r"transformers 4\.57\.6 is not tested .* INT8MOE_TRANSFORMERS_UNTESTED=1"
    ) as caught:
        enable()
    assert all(version in str(caught.value) for version in TESTED_VERSIONS)
    assert not is_enabled()
    monkeypatch.setenv("INT8MOE_TRANSFORMERS_UNTESTED", "1")
    enable()
    assert is_enabled()


def test_absent_transformers_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    with pytest.raises(ConfigError, match="transformers is not installed: pip install"):
        enable()


def test_contexts_that_overlap_end_with_the_last() -> None:
    first, second = enable(), enable()
    with first:
        second.__enter__()
    assert is_enabled()
    second.__exit__(None, None, None)
    assert not is_enabled()


def test_a_wrapper_that_stays_is_no_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import modeling_utils

    before = modeling_utils.get_hf_quantizer
    with enable():
        ours = modeling_utils.get_hf_quantizer
        monkeypatch.setattr(modeling_utils, "get_hf_quantizer", lambda *args, **kwargs: ours(*args, **kwargs))
    with enable():
        config = transformers.LlamaConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=1)
        quantizer, _, _ = modeling_utils.get_hf_quantizer(config, None, None, True, {})
    assert quantizer is None
    monkeypatch.undo()
    modeling_utils.get_hf_quantizer = before
    with enable():
        assert modeling_utils.get_hf_quantizer is not before
    assert modeling_utils.get_hf_quantizer is before
