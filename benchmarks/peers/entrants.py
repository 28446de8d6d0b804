"""From the peers that there are to workers with their layers loaded, or the reason why not."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from interpreters import environment_variables, interpreter
from peer import CannotRun, Peer, peers_of
from rounds import BASE, CONTROL, OTHER_WORK, Entrant
from shapes import Shape
from worker_process import PeerFailed, WorkerProcess

_BYTES_OF_A_PROCESS = 400_000_000
"""Resident memory of Python with torch, beside the weights."""


class NoRun(Exception):
    """The whole comparison cannot be made; says why and what to do."""


@dataclass(frozen=True)
class Plan:
    """What is measured, and how."""

    shape: Shape
    tokens: tuple[int, ...]
    threads: int
    rounds: int
    seconds: float
    """Least length of a block."""
    layers: int
    check: int
    """Tokens of the check, 0 for none."""
    tolerance: float
    """Percent by which CONTROL may differ from BASE."""
    limit: float
    """Seconds that an answer may take; a peer's own limit may be shorter."""
    interpreters: dict[str, Path]
    """By environment."""


@dataclass(frozen=True)
class Candidate:
    """A peer that is to take part, and the file that defines it."""

    label: str
    peer: Peer
    file: Path


@dataclass(frozen=True)
class Refused:
    """A peer that does not take part."""

    peer: str
    reason: str


def known_peers(folders: Iterable[Path]) -> dict[str, Candidate]:
    """Every peer that the files of these folders define, by name."""
    known: dict[str, Candidate] = {}
    for folder in folders:
        try:
            found = list(peers_of(folder))
        except Exception as error:  # whatever a file does when it is imported
            raise NoRun(f"a file of {folder} is no adapter: {type(error).__name__}: {error}") from None
        for file, peer in found:
            if peer.name in known:
                raise NoRun(f"{file} defines the peer {peer.name!r}, which there is already: give it another name")
            known[peer.name] = Candidate(peer.name, peer, file)
    return known


def choose(names: Iterable[str], known: dict[str, Candidate]) -> list[Candidate]:
    """The peers of a run: BASE first, CONTROL in the middle of the round, as far from it as the others are.

    Raises:
        ValueError: for a name that there is not.
    """
    others = []
    for name in dict.fromkeys(names):
        if name not in known:
            near = difflib.get_close_matches(name, known, n=2)
            hint = f"did you mean {' or '.join(near)}?" if near else f"peers are {', '.join(known)}"
            raise ValueError(f"there is no peer {name!r}: {hint}")
        if name != BASE:
            others.append(known[name])
    base = known[BASE]
    middle = (len(others) + 1) // 2
    return [base, *others[:middle], Candidate(CONTROL, base.peer, base.file), *others[middle:]]


def refuse_too_much_memory(plan: Plan, candidates: list[Candidate]) -> None:
    """All layers are in memory at the same time; better a refusal than the system's choice of a victim."""
    layer = plan.shape.weights
    needed = sum(plan.layers * layer * each.peer.weight_bytes + _BYTES_OF_A_PROCESS for each in candidates)
    needed += layer * (1 + max(each.peer.weight_bytes for each in candidates))  # the one that is just being packed
    try:
        rows = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(rows["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return
    if needed > free:
        raise NoRun(
            f"the layers of {len(candidates)} workers take about {needed / 2**30:.1f} GiB and {free / 2**30:.1f} GiB "
            "are free: give fewer --peers or less --gigabytes"
        )


def load(
    plan: Plan,
    candidates: list[Candidate],
    entrants: list[Entrant],
    refused: list[Refused],
    stage: Callable[[str], None],
    advance: Callable[[], None],
) -> None:
    """Start the workers one after the other.

    Args:
        plan: what they load.
        candidates: BASE first.
        entrants: gets those that are ready, as they come, so that the caller can end them whatever happens.
        refused: gets the others.
        stage: told what is loaded now.
        advance: called after each.

    Raises:
        NoRun: where BASE or CONTROL fails, since then there is no ratio.
    """
    for candidate in candidates:
        stage(f"loading {candidate.label}")
        try:
            entrant = _start(plan, candidate)
            entrants.append(entrant)
            if entrant.loaded["checksum"] != entrants[0].loaded["checksum"]:
                entrants.pop().process.end()
                raise PeerFailed(OTHER_WORK)
        except (PeerFailed, CannotRun) as failure:
            if candidate.label in (BASE, CONTROL):
                raise NoRun(f"{candidate.label} has no figures, so there is no ratio: {failure}") from None
            refused.append(Refused(candidate.label, str(failure)))
        advance()


def _start(plan: Plan, candidate: Candidate) -> Entrant:
    peer = candidate.peer
    python = interpreter(peer, plan.interpreters)
    variables = environment_variables(peer, python, plan.threads)
    process = WorkerProcess(python, variables, min(plan.limit, peer.limit))
    try:
        loaded = process.ask(
            "load",
            path=str(candidate.file.resolve()),
            adapter=peer.adapter,
            shape=list(plan.shape),
            threads=plan.threads,
            layers=plan.layers,
            max_tokens=max(*plan.tokens, plan.check, 1),
        )
        error = process.ask("check", tokens=plan.check)["error"] if plan.check else None
    except BaseException:
        process.end()
        raise
    return Entrant(candidate.label, peer, process, {**loaded, "interpreter": str(python)}, error)
