"""Asynchronous orders as slots: chunk c runs microbatch m's forward and backward at fixed slots that move on with m.

A slot is a place in an order and no time. The slot of a forward grows with the chunk and that of a backward falls,
so an order by slot keeps what tasks need for any graph, and it repeats exactly: every device's list is periodic.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

from attrs import evolve, frozen

from pipec.errors import ScheduleError
from pipec.schedules.base import B, F, Op, Problem, R, U

INFLIGHT = ("1f1b", "full")


@frozen
class Slots:
    """The slots of microbatch 0 by chunk, and how many slots later each microbatch comes than the one before.

    ``ranks``: who comes first in a slot of a device: the backward, the forward, the update. ``recompute``: the slots of
    recomputes, which follow the forward of their slot.
    """

    forward: Sequence[int]
    backward: Sequence[int]
    step: int
    ranks: tuple[int, int, int]
    recompute: Sequence[int] = ()


def one_f_one_b_slots(chunks: int) -> Slots:
    """P - i + 1 forwards before the first backward of chunk i; an update follows its last backward at once."""
    return Slots(range(chunks), range(2 * chunks - 1, chunks - 1, -1), 2, (0, 2, 1))


def full_slots(chunks: int) -> Slots:
    """2(P - i) + 1 forwards before the first backward; per tick a backward, a forward, then the update.

    Chunk i = 1..P runs the forward of microbatch m at tick m + i - 1 and the backward at tick m + 2P - i, and an
    update is read from the next tick on (PipeMare, arXiv 1910.05124, section 2).
    """
    return Slots(range(chunks), range(2 * chunks - 1, chunks - 1, -1), 1, (0, 1, 3))


def slots_of(inflight: str, chunks: int) -> Slots:
    """The slots for as many microbatches in flight as 1F1B has ("1f1b"), or as the pipeline can hold ("full").

    Raises:
        ScheduleError: another word.
    """
    if inflight not in INFLIGHT:
        raise ScheduleError(f"inflight must be {' or '.join(map(repr, INFLIGHT))}, got {inflight!r}")
    return one_f_one_b_slots(chunks) if inflight == "1f1b" else full_slots(chunks)


def with_segments(slots: Slots, size: int) -> Slots:
    """``slots`` with a recompute of every chunk, in segments of ``size`` chunks.

    The last chunk of a segment recomputes one slot before its backward, the one before it a slot earlier, and so on:
    just in time, 2(e - i) + 1 slots before the backward at chunk i of a segment that ends at e (PipeMare, appendix on
    recompute).
    """
    ends = [min(c // size * size + size, len(slots.forward)) - 1 for c in range(len(slots.forward))]
    return evolve(slots, recompute=[slots.backward[c] - 2 * (end - c) - 1 for c, end in enumerate(ends)])


def by_slot(problem: Problem, slots: Slots, every: int | None = None) -> list[list[Op]]:
    """Per-device lists in the order of the slots, with an update after every ``every`` backwards of a chunk.

    Raises:
        ScheduleError: ``every`` does not divide the minibatch.
    """
    every = every or problem.minibatch
    if problem.minibatch % every:
        whole = lcm(every, problem.minibatch)
        raise ScheduleError(
            f"updates come every {every} backwards, which does not divide the {problem.minibatch} microbatches of a "
            "minibatch; every step would end in the middle of an update. Feed "
            f"{whole // problem.minibatch} minibatches as one of {whole} microbatches, or let every= be a divisor of "
            f"{problem.minibatch}"
        )
    backward, forward, update = slots.ranks
    lists = []
    for device in range(problem.devices):
        placed: list[tuple[int, int, int, Op]] = []
        for c in problem.on(device):
            for m in range(problem.microbatches):
                ahead = slots.backward[c] + slots.step * m
                placed.append((slots.forward[c] + slots.step * m, forward, c, F(c, m)))
                placed.append((ahead, backward, -c, B(c, m)))
                if slots.recompute:
                    placed.append((slots.recompute[c] + slots.step * m, 2, c, R(c, m)))
                if (m + 1) % every == 0:
                    placed.append((ahead, update, c, U(c, m // every)))
        lists.append([op for *_, op in sorted(placed)])
    return lists
