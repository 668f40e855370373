"""What a schedule policy is given and what it answers.

A policy is an object with one method ``order(problem)``, or just a function of a :class:`Problem`. It
answers, per device, the device's compute tasks in order, as :func:`F`, :func:`B`, :func:`I`, :func:`W` of a
chunk and a microbatch, and :func:`overlap` of those that are to run as one; for asynchronous schedules also as
:func:`U` of a chunk and an update. Everything else (recompute, copies, updates of synchronous schedules, waits,
lifetimes) is added by later passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, runtime_checkable

from attrs import frozen

from pipec.costs import Activations, Costs
from pipec.ir import Chunk, Kind

Op = tuple[int, ...]  # kind, chunk, microbatch, and the slice where a policy orders slices


@frozen
class Overlap:
    """Tasks of one device that run as one: see :func:`overlap`."""

    ops: tuple[Op, ...]

    def __str__(self) -> str:
        return "&".join(op_name(op) for op in self.ops)


Order = Iterable[Iterable[Op | Overlap]]


def F(chunk: int, microbatch: int, *slice_: int) -> Op:  # noqa: N802 - the field's letters
    """Forward of a chunk, of one slice where one is given."""
    return (0, chunk, microbatch, *slice_)


def B(chunk: int, microbatch: int, *slice_: int) -> Op:  # noqa: N802
    """Whole backward of a chunk."""
    return (2, chunk, microbatch, *slice_)


def I(chunk: int, microbatch: int, *slice_: int) -> Op:  # noqa: N802, E743
    """Input half of a chunk's backward."""
    return (3, chunk, microbatch, *slice_)


def W(chunk: int, microbatch: int, *slice_: int) -> Op:  # noqa: N802
    """Weight half of a chunk's backward."""
    return (4, chunk, microbatch, *slice_)


def R(chunk: int, microbatch: int) -> Op:  # noqa: N802
    """Recompute of a chunk; for asynchronous schedules that recompute by segments."""
    return (1, chunk, microbatch)


def U(chunk: int, update: int) -> Op:  # noqa: N802
    """Update of a chunk's stages, numbered from 0; only asynchronous schedules order them."""
    return (7, chunk, update)


def overlap(*ops: Op) -> Overlap:
    """Tasks that a device runs as one, a forward and a backward say: none of them needs another.

    The group starts when all its tasks can and hands on what they make when all have ended. It costs the sum of its
    tasks times ``Costs.overlap``. Where chunks have several stages, the first stages of each run as one, then the
    second ones, and so on.
    """
    return Overlap(tuple(ops))


def tasks_of(row: Iterable[Op | Overlap]) -> list[Op]:
    """The tasks of a device's row, those of each overlap one after another."""
    return [op for entry in row for op in (entry.ops if isinstance(entry, Overlap) else (entry,))]


def op_name(op: Op) -> str:
    """``0F3``: chunk, kind, microbatch; ``0F3.1`` with a slice."""
    return f"{op[1]}{Kind(op[0]).letter}{'.'.join(map(str, op[2:]))}"


@frozen
class Problem:
    """What a policy orders.

    Attributes:
        chunks: in topological order, each on one device. A chunk's forward may read any earlier chunk, its
            backward waits for the later ones; a policy may treat them as a chain.
        edges: (producer chunk, reader chunk) pairs, for policies that want the true graph.
        costs: per chunk sums are at hand through :meth:`cost`, of a whole microbatch.
        microbatches: of all minibatches together.
        minibatches: how many minibatches to order without a flush between them; 1 for synchronous schedules.
        slices: parts of a sequence that each microbatch is cut into. A policy may order them one by one, ``F(chunk,
            microbatch, slice)`` for all tasks; else the slices of each task run in a row, those of backwards from
            the last to the first.
    """

    chunks: tuple[Chunk, ...]
    devices: int
    microbatches: int
    edges: tuple[tuple[int, int], ...]
    costs: Costs
    stage_names: tuple[str, ...]
    memory_limit: float | Activations | None = None
    minibatches: int = 1
    slices: int = 1

    @property
    def minibatch(self) -> int:
        """Microbatches per minibatch."""
        return self.microbatches // self.minibatches

    def on(self, device: int) -> tuple[int, ...]:
        """Indices of the chunks on ``device``, ascending."""
        return tuple(c.index for c in self.chunks if c.device == device)

    def cost(self, kind: Kind, chunk: int) -> float:
        """Duration of one chunk task: the sum over its stages."""
        return sum(self.costs.duration(kind, self.stage_names[s]) for s in self.chunks[chunk].stages)


@runtime_checkable
class Schedule(Protocol):
    """A policy object.

    Optional attributes: ``name``; ``placement`` ("linear", "looped", "v"), its default; ``chunks``, how many
    a device has when looped; ``split``, True when it orders the two halves of backwards; ``bubble``,
    ``peak`` and ``source``, which the table of schedules shows beside the first line of the docstring.
    An asynchronous policy has ``asynchronous = True`` and ``weights``, its :class:`pipec.rules.Rule`; it orders
    ``problem.minibatches`` minibatches, updates included, in a pattern that repeats with every minibatch. One that
    orders recomputes may have ``segment_starts(problem)``, the first chunks of its segments.
    """

    def order(self, problem: Problem) -> Order: ...


Policy = Schedule | Callable[[Problem], Order]


def is_asynchronous(policy: Any) -> bool:
    """True for a policy that orders updates itself and never flushes the pipeline."""
    return bool(getattr(policy, "asynchronous", False))


def policy_name(policy: Any) -> str:
    return str(getattr(policy, "name", None) or getattr(policy, "__name__", None) or type(policy).__name__)
