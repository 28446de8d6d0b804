"""One run of the benchmark: bind, check the memory, load and pack, measure."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from ..binding import BoundKernel, choose
from ..contracts import MoEConfig
from ..errors import NoKernelError
from ..host import thread_limit
from ..host_memory import available_memory, huge_bytes
from ..testing.makers import threads
from .disturbance import Disturbance, between, snapshot
from .inputs import PointInputs
from .layers import PackingReport, check_memory, layer_count, make_layers, random_pool
from .limits import Limits, make_buffer
from .measure import Side, measure_point, warm_up
from .overhead import Overhead, measure_overhead
from .request import Request
from .roofline import expert_bytes
from .summary import PointSamples

_LARGEST_BUFFER = 1 << 30


class MeasuringReport(Protocol):
    """Who wants to know how far measuring is."""

    def begin(self, name: str) -> None:
        """A point is started."""

    def tick(self, done: float) -> None:
        """That share of it is done, 0 to 1."""

    def end(self, text: str) -> None:
        """It is measured, and this came out."""


@dataclass(frozen=True)
class Results:
    """What a run measured.

    Attributes:
        points: one for each M.
        disturbance: from the start of the first to the end of the last.
        overheads: of each kernel by name, or why it was not measured.
    """

    points: tuple[PointSamples, ...]
    disturbance: Disturbance
    overheads: dict[str, Overhead | str]


@contextlib.contextmanager
def thread_count(wanted: int | None) -> Iterator[int]:
    """Set torch's threads and int8moe's own limit to one number meanwhile; None = what a layer would use anyway."""
    count = wanted or min(torch.get_num_threads(), thread_limit())
    with threads(count):
        yield count


class Benchmark:
    """A run of a request: made, loaded, measured.

    Args:
        request: what is wanted.

    Attributes:
        config: of the layers.
        kernels: in the order of the request, bound; the same one again where it was named twice.
        weight_bytes: of all layers that :meth:`load` will make.
        sides: the kernels with their layers; () before :meth:`load`.
        huge_pages: share of the read buffer that lies on huge pages; None where the system does not say.

    Raises:
        NoKernelError: a kernel cannot serve the shape.
        Int8MoEError: the memory does not suffice; the text says for what.
    """

    def __init__(self, request: Request) -> None:
        shape = request.shape
        self.request = request
        self.config = MoEConfig(**{**shape._asdict(), "hidden_dtype": request.dtype})
        names = request.kernels or (None,)
        self.kernels: tuple[BoundKernel, ...] = tuple(choose(self.config, kernel=name)[0] for name in names)
        self.sides: tuple[Side, ...] = ()
        self.huge_pages: float | None = None
        self._different = list({kernel.name: kernel for kernel in self.kernels}.values())
        self._count = layer_count(self.config, request.gigabytes)
        self._buffer_bytes = min(int(request.gigabytes * 1e9), _LARGEST_BUFFER)
        self.weight_bytes = len(self._different) * self._count * shape.num_experts * expert_bytes(self.config)
        check_memory(
            self.config,
            self._different,
            self._count,
            buffer_bytes=self._buffer_bytes,
            tokens=max(request.tokens),
            available=available_memory(),
        )

    def load(self, progress: PackingReport) -> None:
        """Make, load and pack the layers of each kernel."""
        pool = random_pool(self.config)
        sets = {k.name: make_layers(self.config, k, self._count, pool, progress) for k in self._different}
        del pool
        buffer = make_buffer(self._buffer_bytes)
        huge = huge_bytes(buffer.data_ptr(), buffer.numel())
        self.huge_pages = None if huge is None else huge / buffer.numel()
        limits = {kernel.name: Limits(kernel, buffer) for kernel in self._different}
        names = [kernel.name for kernel in self.kernels]
        sides = []
        for index, name in enumerate(names):
            before = names[:index].count(name)
            label = name if not before else f"{name} ({before + 1})"
            sides.append(Side(label, sets[name], limits[name], offset=before * self._count // names.count(name)))
        self.sides = tuple(sides)

    def measure(self, progress: MeasuringReport) -> Results:
        """Measure every point, after :meth:`load`."""
        request = self.request
        overheads: dict[str, Overhead | str] = {}
        if request.overhead:
            for kernel in self._different:
                try:
                    overheads[kernel.name] = measure_overhead(kernel, self.config)
                except NoKernelError as error:
                    overheads[kernel.name] = str(error)
        warm_up(self.sides, PointInputs(self.config, 1, routing=request.routing, seed=request.seed))
        points = []
        before = snapshot()
        for tokens in request.tokens:
            progress.begin(f"M = {tokens}")
            inputs = PointInputs(self.config, tokens, routing=request.routing, seed=request.seed)
            point = measure_point(
                self.sides, inputs, rounds=request.rounds, seconds=request.seconds, tick=progress.tick
            )
            points.append(point)
            best = ", ".join(f"{min(side.seconds) * 1e3:.3g}" for side in point.sides)
            progress.end(f"best of {len(point.sides[0].seconds)} rounds {best} ms")
        return Results(tuple(points), between(before, snapshot()), overheads)
