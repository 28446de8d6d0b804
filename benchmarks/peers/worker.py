"""One peer with its layers loaded, in its own environment: orders come as JSON lines on stdin, answers go to stdout.

Started by run.py, never by hand. Needs Python 3.9, torch and the peer; not int8moe. An order is
``{"order": name, ...}`` with the arguments of the method of that name, an answer is what it returns, or
``{"reason": why not}``.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import platform
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import disturbance
from peer import Adapter, CannotRun, load_adapter_file
from shapes import Shape

_PR_SET_PDEATHSIG = 1
# Distinct inputs of one number of tokens: enough that none is in a cache when its turn comes again.
_MOST_CALLS, _FEWEST_CALLS, _TOKENS_OF_ALL_CALLS = 64, 4, 2048


class Worker:
    """What it can be ordered to do, in the order in which it has to be."""

    def __init__(self) -> None:
        self.adapter = Adapter(Shape(1, 1, 1, 1), 1, 1)
        self.layers: list[Any] = []
        self.calls: list[tuple[Any, ...]] = []
        self.position = 0

    def load(self, path: str, adapter: str, shape: list[int], threads: int, layers: int, max_tokens: int) -> Any:
        """Make and pack layers 0, 1, ... with these seeds."""
        self.adapter = getattr(load_adapter_file(Path(path)), adapter)(Shape(*shape), threads, max_tokens)
        # Only now: what the machine or the environment lacks is told before time goes into weights.
        import torch

        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        from layer_data import checksum, make_weights

        seen, seconds = 0, []
        for seed in range(layers):
            weights = make_weights(self.adapter.shape, seed)
            seen = checksum(weights, seen)
            start = time.perf_counter()
            self.layers.append(self.adapter.pack(weights))
            seconds.append(time.perf_counter() - start)
            del weights
            _give_memory_back()
        return {
            "version": self.adapter.version(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "checksum": seen,
            "pack_seconds": seconds,
            **_memory(),
        }

    def prepare(self, tokens: int) -> Any:
        """Make the inputs of calls with so many tokens."""
        from layer_data import checksum, make_calls

        count = min(_MOST_CALLS, max(_FEWEST_CALLS, _TOKENS_OF_ALL_CALLS // tokens))
        count = math.ceil(count / len(self.layers)) * len(self.layers)
        seen = 0
        self.calls = []
        self.position = 0
        for number, call in enumerate(make_calls(self.adapter.shape, tokens, len(self.layers), count)):
            seen = checksum(call, seen)
            ids = self.adapter.prepare_ids(call.topk_ids)
            layer = self.layers[number % len(self.layers)]
            self.calls.append((layer, call.hidden_states, ids, call.topk_weights))
        return {"checksum": seen}

    def check(self, tokens: int) -> Any:
        """The relative L2 error of one call of layer 0."""
        from layer_data import make_calls, make_weights, reference, relative_l2

        call = make_calls(self.adapter.shape, tokens, 1, 1)[0]
        ids = self.adapter.prepare_ids(call.topk_ids)
        found = self.adapter.run(self.layers[0], call.hidden_states, ids, call.topk_weights)
        if found.shape != call.hidden_states.shape:
            raise CannotRun(f"its output is {list(found.shape)}, not {list(call.hidden_states.shape)}")
        return {"error": relative_l2(found, reference(make_weights(self.adapter.shape, 0), call))}

    def block(self, seconds: float) -> Any:
        """One call to wake its threads, then timed ones for so long, one at least.

        Which layer and inputs a call gets goes on from the block before.
        """
        run = self.adapter.run
        self._next_call(run)
        times: list[float] = []
        start = disturbance.now()
        end = time.perf_counter() + seconds
        while not times or time.perf_counter() < end:
            times.append(self._next_call(run))
        return {"seconds": times, "disturbance": disturbance.between(start, disturbance.now())}

    def _next_call(self, run: Callable[..., Any]) -> float:
        arguments = self.calls[self.position]
        self.position = (self.position + 1) % len(self.calls)
        start = time.perf_counter()
        run(*arguments)
        return time.perf_counter() - start


def _give_memory_back() -> None:
    """Let glibc return freed blocks, so that all peers' weights fit beside each other."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _memory() -> dict[str, int]:
    """Resident bytes, and those of them on huge pages; empty where the system does not tell."""
    keys = {"Rss:": "resident_bytes", "AnonHugePages:": "huge_page_bytes"}
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return {}
    rows = [line.split() for line in lines]
    return {keys[words[0]]: int(words[1]) * 1024 for words in rows if words[0] in keys}


def _reason(error: BaseException) -> str:
    """One line for the peer's row."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else "no message"
    return text if isinstance(error, CannotRun) else f"{type(error).__name__}: {text}"


def _end_with_the_runner() -> None:
    """Even a worker that hangs, or that is stopped, ends when the runner is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def main() -> None:
    """Answer orders until there are no more."""
    _end_with_the_runner()
    # Native libraries print where they like: what they say on stdout goes to stderr, and answers stay whole.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    worker = Worker()
    for line in sys.stdin:
        arguments = json.loads(line)
        order = arguments.pop("order")
        try:
            answer = getattr(worker, order)(**arguments)
        except Exception as error:
            answer = {"reason": _reason(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
