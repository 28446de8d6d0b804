"""Settings of the whole process, which a kernel finds as its caller left them and leaves as it found them."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Setting(NamedTuple):
    """One setting.

    Attributes:
        name: of its case.
        text: for people.
        get: what it is.
        put: makes it a value.
        values: two, so that a kernel which makes it one of them, over and over, is seen by the other.
    """

    name: str
    text: str
    get: Callable[[], Any]
    put: Callable[[Any], object]
    values: tuple[Any, Any]


def flushes() -> bool:
    """Whether this thread takes denormals for zero."""
    return bool((torch.full((1,), 2.0**-126, dtype=torch.float32) * 0.5 == 0).item())


def _torch_state() -> tuple[int, ...]:
    return tuple(torch.get_rng_state().tolist())


def _seeded(seed: int) -> tuple[int, ...]:
    return tuple(torch.Generator().manual_seed(seed).get_state().tolist())


_THREAD_VARIABLES = ("OMP_", "GOMP_", "KMP_", "MKL_")


def _environment() -> dict[str, str]:
    return dict(os.environ)


def _put_environment(values: dict[str, str]) -> None:
    for name in os.environ.keys() - values.keys():
        del os.environ[name]
    os.environ.update(values)


def settings() -> tuple[Setting, ...]:
    """Every setting; what it is now is not asked for."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(_THREAD_VARIABLES)}
    return (
        Setting("threads", "torch.get_num_threads()", torch.get_num_threads, torch.set_num_threads, (2, 3)),
        Setting(
            "default-dtype",
            "torch.get_default_dtype()",
            torch.get_default_dtype,
            torch.set_default_dtype,
            (torch.float32, torch.float64),
        ),
        Setting("grad-mode", "torch.is_grad_enabled()", torch.is_grad_enabled, torch.set_grad_enabled, (True, False)),
        Setting(
            "deterministic-algorithms",
            "torch.are_deterministic_algorithms_enabled()",
            torch.are_deterministic_algorithms_enabled,
            torch.use_deterministic_algorithms,
            (False, True),
        ),
        Setting(
            "matmul-precision",
            "torch.get_float32_matmul_precision()",
            torch.get_float32_matmul_precision,
            torch.set_float32_matmul_precision,
            ("highest", "medium"),
        ),
        Setting("flushing", "the flushing of denormals", flushes, torch.set_flush_denormal, (False, True)),
        Setting(
            "torch-random-state",
            "torch's random state",
            _torch_state,
            lambda state: torch.set_rng_state(torch.tensor(state, dtype=torch.uint8)),
            (_seeded(1), _seeded(2)),
        ),
        Setting(
            "random-state",
            "Python's random state",
            random.getstate,
            random.setstate,
            (random.Random(1).getstate(), random.Random(2).getstate()),
        ),
        Setting(
            "environment", "os.environ", _environment, _put_environment, (plain, {**plain, "OMP_NUM_THREADS": "5"})
        ),
    )
