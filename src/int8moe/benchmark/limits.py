"""Measures what a machine can do at most, with a kernel's own reads and multiply-adds where it offers them."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from ..binding import BoundKernel
from ..errors import Int8MoEError
from ..storage import allocate_bytes

TORCH_READER = "torch.sum"
_SMALLEST_READ = 32 << 20
"""A shorter read would time the start of the threads, not the memory."""
_SHORTEST_BURST, _LONGEST_BURST = 0.004, 0.1
"""Seconds."""
_MOST_ITERATIONS = 1 << 40
_LINE = 4096


def make_buffer(nbytes: int) -> Tensor:
    """uint8 on huge pages where the system gives them, every page written: an untouched one would be the zero page."""
    return allocate_bytes(max(nbytes, 2 * _SMALLEST_READ) // _LINE * _LINE, torch.device("cpu")).fill_(1)


class Limits:
    """Both limits of one kernel, measured between its calls and about as long as they: noise hits both alike.

    Args:
        kernel: whose hooks are asked.
        buffer: from :func:`make_buffer`; the reads go round it, so that they find nothing in a cache.

    Attributes:
        reader: "read_memory", the kernel's own, or ``torch.sum`` over 64-bit words for a kernel that has none.

    Raises:
        Int8MoEError: a hook fails, or returns no count.
    """

    def __init__(self, kernel: BoundKernel, buffer: Tensor) -> None:
        self._name = kernel.name
        self._buffer = buffer
        self._position = 0
        self.reader = TORCH_READER if kernel.read_memory is None else "read_memory"
        self._read = kernel.read_memory or _sum_words
        self._run_peak = kernel.run_peak
        self._fewest = self._most = self._ops_an_iteration = 0.0
        if kernel.run_peak is not None:
            self._fewest, self._most = self._calibrated(kernel.run_peak)
            self._ops_an_iteration = 2 * self._burst(kernel.run_peak, round(self._fewest)) / self._fewest

    def bandwidth(self, nbytes: int) -> float:
        """Bytes/s of one read of about so many bytes."""
        length = min(max(nbytes, _SMALLEST_READ) // _LINE * _LINE, self._buffer.numel())
        if self._position + length > self._buffer.numel():
            self._position = 0
        piece = self._buffer[self._position : self._position + length]
        self._position += length
        began = time.perf_counter()
        try:
            self._read(piece)
        except Exception as error:
            raise self._failed("read_memory", error) from error
        return length / (time.perf_counter() - began)

    def peak(self, ops: int) -> float | None:
        """int8 operations/s of one burst of about so many; None for a kernel without ``run_peak``."""
        if self._run_peak is None:
            return None
        iterations = round(min(max(ops / self._ops_an_iteration, self._fewest), self._most))
        began = time.perf_counter()
        done = self._burst(self._run_peak, iterations)
        return 2 * done / (time.perf_counter() - began)

    def _calibrated(self, run_peak: Callable[[int], int]) -> tuple[float, float]:
        """Iterations of the shortest burst that says something about the arithmetic, and of the longest.

        While the rate still grows with the iterations, the time is that of starting the threads, however long it is.
        """
        iterations, best, steady = 1, 0.0, 0
        while iterations < _MOST_ITERATIONS:
            rate = iterations / min(self._timed_burst(run_peak, iterations) for _ in range(3))
            steady = steady + 1 if rate < 1.5 * best else 0
            best = max(best, rate)
            if steady >= 2 and iterations / best >= _SHORTEST_BURST / 2:
                break
            iterations *= 2
        return iterations, max(iterations, _LONGEST_BURST * best)

    def _timed_burst(self, run_peak: Callable[[int], int], iterations: int) -> float:
        began = time.perf_counter()
        self._burst(run_peak, iterations)
        return time.perf_counter() - began

    def _burst(self, run_peak: Callable[[int], int], iterations: int) -> int:
        try:
            done = run_peak(iterations)
        except Exception as error:
            raise self._failed("run_peak", error) from error
        if not isinstance(done, int) or done <= 0:
            raise Int8MoEError(
                f"kernel {self._name!r}: run_peak({iterations}) returned {done!r}; it has to return how many int8 "
                "multiply-adds all threads did together, a whole number above 0"
            )
        return done

    def _failed(self, hook: str, error: Exception) -> Int8MoEError:
        return Int8MoEError(f"kernel {self._name!r}: its hook {hook} failed: {type(error).__name__}: {error}")


def _sum_words(buffer: Tensor) -> None:
    buffer.view(torch.int64).sum()
