"""Fork: a child forked after a parallel region runs the same layer, in time, with the same bits."""

from __future__ import annotations

import functools
import os
import select
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator

import torch

from ..bits import assert_same_bits
from ..case import Case, Grid, skip
from ..makers import make_experts, threads
from ..target import Target

_SECONDS = 20.0


def _forked(target: Target, tokens: int, count: int) -> None:
    if not hasattr(os, "fork"):
        skip("this system has no fork")
    if target.spec.device != "cpu":
        skip(f"device {target.spec.device}: a driver's context does not survive fork")
    config = target.config(num_experts=4, hidden_size=256, intermediate_size=128)
    experts = make_experts(config, seed=91)
    layer = target.layer(config, experts)
    inputs = target.inputs(config, tokens, seed=92)
    with threads(count):
        target.check(layer, experts, inputs)
        # torch's own pool is warm as well: a large sum and a product.
        torch.ones(1 << 20).sum()
        torch.ones(256, 256) @ torch.ones(256, 256)
        expected = target.forward(layer, *inputs)
        message = _in_child(lambda: assert_same_bits(target.forward(layer, *inputs), expected))
        assert message == "", f"the forked child: {message}"
        target.match(target.forward(layer, *inputs), expected, "the parent, after the fork")


def _in_child(work: Callable[[], None]) -> str:
    """Run ``work`` in a forked child; "" when it came through, else what went wrong."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # "multi-threaded, use of fork() may deadlock"
        child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reader)
            work()
            status = 0
        except BaseException:  # nothing may leave the child
            os.write(writer, traceback.format_exc()[-3000:].encode())
        finally:
            os._exit(status)
    os.close(writer)
    try:
        return _wait(child, reader)
    finally:
        os.close(reader)


def _wait(child: int, reader: int) -> str:
    deadline = time.monotonic() + _SECONDS
    text = b""
    while time.monotonic() < deadline:
        ready, _, _ = select.select([reader], [], [], 0.05)
        if ready and (chunk := os.read(reader, 4096)):
            text += chunk
            continue
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return text.decode(errors="replace").strip() or ("" if code == 0 else f"ended with {code}")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return f"did not finish within {_SECONDS:g} s"


def cases(grid: Grid) -> Iterator[Case]:
    """Make the cases."""
    for tokens in (1, 64):
        for count in (1, 2):
            name = f"child-M{tokens}-threads{count}"
            yield Case("fork", name, functools.partial(_forked, tokens=tokens, count=count))
