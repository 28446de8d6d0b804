"""The least time that a call can take on this machine. Pure arithmetic; imports no torch.

Two limits: every expert that is touched has to be read once, and every multiply-add has to be done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from ..contracts import MoEConfig


class Work(NamedTuple):
    """What one call has to do.

    Attributes:
        tokens: M.
        touched_experts: different experts that the tokens go to.
        weight_bytes: of their int8 weights; scales, biases and activations are not counted.
        ops: int8 operations, two a multiply-add.
    """

    tokens: int
    touched_experts: int
    weight_bytes: int
    ops: int


def expert_bytes(config: MoEConfig) -> int:
    """Bytes of one expert's int8 weights, which is also its multiply-adds a row."""
    return config.hidden_size * (config.w13_rows + config.intermediate_size)


def work_of(config: MoEConfig, tokens: int, touched_experts: int) -> Work:
    """The work of a call with ``tokens * top_k`` rows that go to so many different experts."""
    one = expert_bytes(config)
    return Work(tokens, touched_experts, touched_experts * one, 2 * tokens * config.top_k * one)


class Roofline(NamedTuple):
    """The limits of one call.

    Attributes:
        memory_seconds: reading the weights.
        compute_seconds: the operations at the peak; None where the peak was not measured.
        seconds: the larger of the two: no call is faster. None where that cannot be known.
        bound: which of the two it is; None where that cannot be known.
    """

    memory_seconds: float
    compute_seconds: float | None
    seconds: float | None
    bound: Literal["memory", "compute"] | None


def roofline(work: Work, *, bandwidth: float, peak: float | None, achieved: float) -> Roofline:
    """The limits of a call.

    Without a peak the binding limit is known in one case: at the rate that the kernel has reached itself somewhere in
    the run, the operations would take no longer than the reading. The peak is not below that rate, so memory binds.

    Args:
        work: what the call does.
        bandwidth: bytes/s that can be read.
        peak: operations/s of the kernel's best instruction; None where it was not measured.
        achieved: most operations/s that any call of this kernel reached in the run.
    """
    memory = work.weight_bytes / bandwidth
    if peak is None:
        if work.ops / achieved <= memory:
            return Roofline(memory, None, memory, "memory")
        return Roofline(memory, None, None, None)
    compute = work.ops / peak
    return Roofline(memory, compute, max(memory, compute), "compute" if compute > memory else "memory")
