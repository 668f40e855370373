"""What a schedule policy is given and what it answers.

A policy is an object with one method ``order(problem)``, or just a function of a :class:`Problem`. It answers,
per device, the device's compute tasks in order, as :func:`F`, :func:`B`, :func:`I`, :func:`W` of a chunk and a
microbatch. Everything else (recompute, copies, updates, waits, lifetimes) is added by later passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

from attrs import frozen

from pipec.costs import Activations, Costs
from pipec.ir import Chunk, Kind

Op = tuple[int, int, int]  # kind, chunk, microbatch
Order = Iterable[Iterable[Op]]


def F(chunk: int, microbatch: int) -> Op:  # noqa: N802 - the field's letters
    """Forward of a chunk."""
    return (0, chunk, microbatch)


def B(chunk: int, microbatch: int) -> Op:  # noqa: N802
    """Whole backward of a chunk."""
    return (2, chunk, microbatch)


def I(chunk: int, microbatch: int) -> Op:  # noqa: N802, E743
    """Input half of a chunk's backward."""
    return (3, chunk, microbatch)


def W(chunk: int, microbatch: int) -> Op:  # noqa: N802
    """Weight half of a chunk's backward."""
    return (4, chunk, microbatch)


@frozen
class Problem:
    """What a policy orders.

    Attributes:
        chunks: in topological order, each on one device. A chunk's forward may read any earlier chunk, its
            backward waits for the later ones; a policy may treat them as a chain.
        edges: (producer chunk, reader chunk) pairs, for policies that want the true graph.
        costs: per chunk sums are at hand through :meth:`cost`.
    """

    chunks: tuple[Chunk, ...]
    devices: int
    microbatches: int
    edges: tuple[tuple[int, int], ...]
    costs: Costs
    stage_names: tuple[str, ...]
    memory_limit: float | Activations | None = None

    def on(self, device: int) -> tuple[int, ...]:
        """Indices of the chunks on ``device``, ascending."""
        return tuple(c.index for c in self.chunks if c.device == device)

    def cost(self, kind: Kind, chunk: int) -> float:
        """Duration of one chunk task: the sum over its stages."""
        return sum(self.costs.duration(kind, self.stage_names[s]) for s in self.chunks[chunk].stages)


@runtime_checkable
class Schedule(Protocol):
    """A policy object. ``name`` and ``placement`` ("linear", "looped", "v") are optional attributes."""

    def order(self, problem: Problem) -> Order: ...


Policy = Schedule | Callable[[Problem], Order]


def policy_name(policy: Any) -> str:
    return str(getattr(policy, "name", None) or getattr(policy, "__name__", None) or type(policy).__name__)


def merge(problem: Problem, sequences: Sequence[Sequence[Op]]) -> list[list[Op]]:
    """Per-chunk sequences joined into per-device lists in the order in which they would run.

    Every device starts, among the next ops of its chunks, the one that is ready first (backwards and later
    chunks before others on a tie). The result follows an execution, so it cannot deadlock.
    """
    count, devices = len(sequences), problem.devices
    producers: list[list[int]] = [[] for _ in range(count)]
    readers: list[list[int]] = [[] for _ in range(count)]
    for source, reader in problem.edges:
        producers[reader].append(source)
        readers[source].append(reader)
    durations = {(k, c): problem.cost(Kind(k), c) or 1e-9 for c in range(count) for k in (0, 2, 3, 4)}
    latency = problem.costs.latency
    done: dict[Op, float] = {}
    position, free = [0] * count, [0.0] * devices
    lists: list[list[Op]] = [[] for _ in range(devices)]
    owner = [chunk.device for chunk in problem.chunks]

    def ready(op: Op) -> float | None:
        kind, chunk, m = op
        if kind == 4:
            return done.get((3, chunk, m))
        needs = [(0, p, m) for p in producers[chunk]] if kind == 0 else [(0, chunk, m)]
        latest = 0.0
        for need in needs:
            end = done.get(need)
            if end is None:
                return None
            latest = max(latest, end + (latency if owner[need[1]] != owner[chunk] else 0.0))
        if kind != 0:
            for reader in readers[chunk]:
                end = done.get((2, reader, m), done.get((3, reader, m)))
                if end is None:
                    return None
                latest = max(latest, end + (latency if owner[reader] != owner[chunk] else 0.0))
        return latest

    left = sum(map(len, sequences))
    while left:
        best: tuple[float, int, int, int] | None = None
        for chunk in range(count):
            if position[chunk] < len(sequences[chunk]):
                op = sequences[chunk][position[chunk]]
                when = ready(op)
                if when is not None:
                    key = (max(when, free[owner[chunk]]), -op[0], -chunk if op[0] else chunk, chunk)
                    if best is None or key < best:
                        best = key
        if best is None:  # left to the linearising pass, which reports where every device stands
            for chunk in range(count):
                lists[owner[chunk]] += sequences[chunk][position[chunk] :]
            return lists
        chunk = best[3]
        op = sequences[chunk][position[chunk]]
        position[chunk] += 1
        left -= 1
        done[op] = free[owner[chunk]] = best[0] + durations[op[0], chunk]
        lists[owner[chunk]].append(op)
    return lists
