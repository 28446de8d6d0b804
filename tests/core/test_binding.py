"""Hooks that are forgotten, misspelt or mis-signed, live registration, quarantine."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from int8moe import (
    DuplicateKernelError,
    FusedMoE,
    KernelSpec,
    MoEConfig,
    NoKernelError,
    Numerics,
    PluginLoadError,
    Supported,
    Unsupported,
    WeightLayout,
    hookimpl,
    register_kernel,
    select_kernel,
)
from int8moe.binding import bind
from int8moe.reference import ReferenceExperts
from int8moe.registry import get_registry

CONFIG = MoEConfig(num_experts=4, top_k=2, hidden_size=64, intermediate_size=32)


class Good:
    @hookimpl
    def process_weights_after_loading(self, layer: Any) -> WeightLayout:
        return WeightLayout.canonical()

    @hookimpl
    def apply(self, layer: Any, hidden_states: Any, topk_weights: Any, topk_ids: Any, out: Any) -> None:
        ReferenceExperts().apply(layer, hidden_states, topk_weights, topk_ids, out)


def provider(kernel_class: type, namespace: str = "live", **fields: Any) -> object:
    declared: dict[str, Any] = {
        "name": f"{namespace}.fast", "target": kernel_class, "activations": ("silu",),
        "dtypes": ("bfloat16", "float16", "float32"), "layout": "canonical", "numerics": Numerics.bitwise(),
        "priority": 99,
    }  # fmt: skip
    spec = KernelSpec(**{**declared, **fields})

    class Provider:
        @hookimpl
        def register_kernels(self) -> list[KernelSpec]:
            return [spec]

    return Provider()


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    for namespace in ("live", "other"):
        get_registry().unregister(namespace)


def no_hook() -> type:
    class NoPack:
        apply = Good.apply

    return NoPack


def misspelt() -> type:
    class Misspelt(Good):
        @hookimpl
        def aply(self, layer: Any, hidden_states: Any, topk_weights: Any, topk_ids: Any, out: Any) -> None: ...

    return Misspelt


def unmarked() -> type:
    class Unmarked(Good):
        def apply(self, layer: Any, hidden_states: Any, topk_weights: Any, topk_ids: Any, out: Any) -> None: ...

    return Unmarked


def unmarked_optional() -> type:
    class UnmarkedOptional(Good):
        def restore_weights(self, layer: Any) -> None: ...

    return UnmarkedOptional


def reordered() -> type:
    class Reordered(Good):
        @hookimpl
        def apply(self, layer: Any, hidden_states: Any, topk_ids: Any, topk_weights: Any, out: Any) -> None: ...

    return Reordered


def missing_argument() -> type:
    class Missing(Good):
        @hookimpl
        def apply(self, layer: Any, hidden_states: Any, topk_weights: Any, topk_ids: Any) -> None: ...

    return Missing


def extra_argument() -> type:
    class Extra(Good):
        @hookimpl
        def process_weights_after_loading(self, layer: Any, config: Any) -> None: ...

    return Extra


def default_argument() -> type:
    class Default(Good):
        @hookimpl
        def process_weights_after_loading(self, layer: Any = None) -> None: ...

    return Default


def star_arguments() -> type:
    class Star(Good):
        @hookimpl
        def apply(self, *args: Any) -> None: ...

    return Star


def wrapper() -> type:
    class Wrapper(Good):
        @hookimpl(wrapper=True)
        def apply(self, layer: Any, hidden_states: Any, topk_weights: Any, topk_ids: Any, out: Any) -> Any:
            return (yield)

    return Wrapper


@pytest.mark.parametrize(
    ("make", "hook"),
    [(no_hook, "process_weights_after_loading"), (misspelt, "aply"), (unmarked, "apply"),
     (unmarked_optional, "restore_weights"), (reordered, "apply"), (missing_argument, "apply"),
     (extra_argument, "process_weights_after_loading"), (default_argument, "process_weights_after_loading"),
     (star_arguments, "apply"), (wrapper, "apply")],
)  # fmt: skip
def test_a_wrong_hook_is_refused_with_its_name_and_signature(make: Any, hook: str) -> None:
    with pytest.raises(PluginLoadError, match=f"live.fast.*{hook}") as caught:
        register_kernel(provider(make()))
    assert "(" in str(caught.value)
    with pytest.raises(NoKernelError):
        get_registry().find("live.fast")  # nothing of it stays registered
    register_kernel(provider(Good))  # and the name is free
    assert select_kernel(CONFIG).chosen == "live.fast"


@pytest.mark.parametrize(
    ("target", "word"),
    [
        ("nothing_here:X", "nothing_here"),
        ("int8moe.reference:Nothing", "Nothing"),
        ("int8moe.reference:exp", "name a class"),
    ],
)
def test_a_target_that_does_not_load_is_refused(target: str, word: str) -> None:
    with pytest.raises(PluginLoadError, match=word):
        register_kernel(provider(Good, target=target))


def test_a_class_is_no_provider() -> None:
    with pytest.raises(PluginLoadError, match="the class"):
        register_kernel(type(provider(Good)))


def test_a_taken_namespace_is_a_duplicate() -> None:
    register_kernel(provider(Good))
    with pytest.raises(DuplicateKernelError, match="live"):
        register_kernel(provider(Good))
    with pytest.raises(DuplicateKernelError, match="reference"):
        register_kernel(provider(Good, namespace="reference"))


class OneBitOff(Good):
    @hookimpl
    def apply(self, layer: Any, hidden_states: Any, topk_weights: Any, topk_ids: Any, out: Any) -> None:
        ReferenceExperts().apply(layer, hidden_states, topk_weights, topk_ids, out)
        bits = out.view({2: torch.int16, 4: torch.int32}[out.element_size()])
        bits[0, 3] ^= 1


class WrongForManyRows(Good):
    """A tile of a matrix unit that no small batch enters."""

    @hookimpl
    def apply(self, layer: Any, hidden_states: Any, topk_weights: Any, topk_ids: Any, out: Any) -> None:
        ReferenceExperts().apply(layer, hidden_states, topk_weights, topk_ids, out)
        if int(topk_ids[topk_ids >= 0].bincount().max()) > 32:
            out[32] = 0


class Raises(Good):
    @hookimpl
    def apply(self, layer: Any, hidden_states: Any, topk_weights: Any, topk_ids: Any, out: Any) -> None:
        raise RuntimeError("boom")


class ReturnsNone(Good):
    @hookimpl
    def process_weights_after_loading(self, layer: Any) -> None: ...


class ChangesShape(Good):
    @hookimpl
    def process_weights_after_loading(self, layer: Any) -> WeightLayout:
        layer.w13_weight = layer.w13_weight.view(-1)
        return WeightLayout.canonical()


class ForeignLayout(Good):
    @hookimpl
    def process_weights_after_loading(self, layer: Any) -> WeightLayout:
        return WeightLayout(namespace="somebody", name="canonical")


@pytest.mark.parametrize(
    ("kernel_class", "word"),
    [(OneBitOff, "bits differ in 1 of"), (WrongForManyRows, "bits differ in"), (Raises, "boom"), (ReturnsNone, "WeightLayout"),
     (ChangesShape, "canonical"), (ForeignLayout, "namespace")],
)  # fmt: skip
def test_a_wrong_kernel_is_quarantined_and_named(
    kernel_class: type, word: str, caplog: pytest.LogCaptureFixture
) -> None:
    register_kernel(provider(kernel_class))
    with caplog.at_level(logging.WARNING, "int8moe"):
        report = select_kernel(CONFIG)
    assert report.chosen != "live.fast"
    reasons = {name: reason for name, _, reason in report.rejected}
    assert "quarantined" in reasons["live.fast"]
    assert word in reasons["live.fast"]
    assert any("live.fast" in record.message and record.levelname == "ERROR" for record in caplog.records)
    with pytest.raises(PluginLoadError, match=r"live\.fast.*quarantined"):  # pinned: an error, no fallback
        FusedMoE(CONFIG, kernel="live.fast")


def test_tolerance_is_used_only_when_named() -> None:
    numerics = Numerics.tolerance(rtol=0.01, reason="wraps another library")
    register_kernel(provider(OneBitOff, numerics=numerics))
    report = select_kernel(CONFIG)
    assert "not bitwise" in {name: reason for name, _, reason in report.rejected}["live.fast"]
    assert select_kernel(CONFIG, kernel="live.fast").chosen == "live.fast"


def test_an_absolute_tolerance_is_enough() -> None:
    numerics = Numerics.tolerance(rtol=0.0, atol=10.0, reason="wraps another library")
    register_kernel(provider(OneBitOff, numerics=numerics))
    assert select_kernel(CONFIG, kernel="live.fast").chosen == "live.fast"


def test_a_kernel_of_another_machine_is_refused_before_its_code_is_loaded() -> None:
    class Native(Good):
        def __init__(self) -> None:
            raise AssertionError("this would be an illegal instruction")

    for fields in ({"unavailable": "machine is a toaster"}, {"isa": (("toast",),)}):
        get_registry().register(provider(Native, **fields))
        with pytest.raises(NoKernelError, match="toast"):
            bind("live.fast")
        get_registry().unregister("live")


def test_a_picky_kernel_is_tested_on_what_it_takes() -> None:
    class PickyAndWrong(OneBitOff):
        @hookimpl
        def is_supported_config(self, config: Any, host: Any) -> Any:
            return Unsupported("not a multiple of 32") if config.hidden_size % 32 else Supported()

    class VeryPickyAndWrong(OneBitOff):
        @hookimpl
        def is_supported_config(self, config: Any, host: Any) -> Any:
            return Supported() if config.hidden_size == 40 else Unsupported("is not 40")

    for kernel_class, size in ((PickyAndWrong, 64), (VeryPickyAndWrong, 40)):
        register_kernel(provider(kernel_class))
        report = select_kernel(CONFIG.model_copy(update={"hidden_size": size}))
        assert "quarantined" in {name: reason for name, _, reason in report.rejected}["live.fast"]
        get_registry().unregister("live")


class ExitsInInit(Good):
    def __init__(self) -> None:
        raise SystemExit("no licence")


class ExitsInApply(Good):
    @hookimpl
    def apply(self, layer: Any, hidden_states: Any, topk_weights: Any, topk_ids: Any, out: Any) -> None:
        raise SystemExit("no licence")


class ExitsInSupport(Good):
    @hookimpl
    def is_supported_config(self, config: Any, host: Any) -> Any:
        raise GeneratorExit("no licence")


@pytest.mark.parametrize("kernel_class", [ExitsInInit, ExitsInApply, ExitsInSupport])
def test_a_kernel_cannot_end_the_process(kernel_class: type) -> None:
    get_registry().register(provider(kernel_class))
    report = select_kernel(CONFIG)
    assert report.chosen != "live.fast"
    assert "no licence" in {name: reason for name, _, reason in report.rejected}["live.fast"]
    with pytest.raises(PluginLoadError, match="no licence"):
        select_kernel(CONFIG, kernel="live.fast")


def test_a_kernel_may_refuse_a_config_itself() -> None:
    class Picky(Good):
        @hookimpl
        def is_supported_config(self, config: Any, host: Any) -> Any:
            return Supported() if config.hidden_size % 64 else Unsupported(f"hidden_size {config.hidden_size} is even")

    register_kernel(provider(Picky))
    report = select_kernel(CONFIG)
    assert {name: reason for name, _, reason in report.rejected}["live.fast"] == "hidden_size 64 is even"
    with pytest.raises(NoKernelError, match="is even"):
        select_kernel(CONFIG, kernel="live.fast")
    assert select_kernel(CONFIG.model_copy(update={"hidden_size": 65})).chosen == "live.fast"


def test_a_fallback_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    register_kernel(provider(Raises, namespace="other"))
    with caplog.at_level(logging.WARNING, "int8moe"):
        select_kernel(CONFIG)
        select_kernel(CONFIG)
    assert sum("falling back" in record.message and "other.fast" in record.message for record in caplog.records) == 1
