"""The suite serves kernels of any device: what it hands to a layer lies where the kernel's layers do.

No device is needed: what Target.to_device returns is marked, and so is what is made of it.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from int8moe.layer import FusedMoE
from int8moe.testing.case import CaseSkipped
from int8moe.testing.groups import GROUPS
from int8moe.testing.groups import refusals as refusal_cases
from int8moe.testing.target import Target, copy_with_strides


class OnDevice(Tensor):
    """A tensor of the kernel's device; results of operations on it are, too."""


class ElsewhereError(Exception):
    """Not what a case expects a layer to raise."""


def watched(call: Any) -> Any:
    def checked(layer: FusedMoE, *args: Any, **kwargs: Any) -> Tensor:
        named = {**dict(enumerate(args)), **kwargs}
        for name, value in named.items():
            # The counts of forward_sorted may lie anywhere, and "meta" is what a refusal may be about.
            if isinstance(value, Tensor) and not (
                isinstance(value, OnDevice) or value.is_meta or (call.__name__ == "forward_sorted" and name == 1)
            ):
                raise ElsewhereError(f"argument {name} of {call.__name__} is on the CPU")
        plain = {k: v.as_subclass(Tensor) if isinstance(v, OnDevice) else v for k, v in named.items()}
        result: Tensor = call(
            layer, *(plain[i] for i in range(len(args))), **{k: v for k, v in plain.items() if isinstance(k, str)}
        )
        return result

    return checked


def placed(call: Any) -> Any:
    def checked(*args: Any, **kwargs: Any) -> Any:
        if "device" not in kwargs:
            raise ElsewhereError(f"{call.__qualname__} is asked for the CPU")
        return call(*args, **kwargs)

    return checked


@pytest.mark.parametrize("group", ["refusals", "packing", "routing", "rows", "strides"])
def test_layers_get_what_lies_on_the_kernels_device(monkeypatch: pytest.MonkeyPatch, group: str) -> None:
    monkeypatch.setattr(
        Target, "to_device", lambda self, tensor: copy_with_strides(tensor, "cpu").as_subclass(OnDevice)
    )
    for name in ("forward", "forward_sorted"):
        monkeypatch.setattr(FusedMoE, name, watched(getattr(FusedMoE, name)))
    monkeypatch.setattr(FusedMoE, "__init__", placed(FusedMoE.__init__))
    monkeypatch.setattr(refusal_cases, "select_kernel", placed(refusal_cases.select_kernel))
    target = Target("reference.torch", threads=(1,))
    ran = 0
    for case in GROUPS[group]("reduced"):
        try:
            case.run_on(target)
            ran += 1
        except CaseSkipped:
            pass
        except ElsewhereError as error:
            raise AssertionError(f"{case.id}: {error}") from None
    assert ran > 0
