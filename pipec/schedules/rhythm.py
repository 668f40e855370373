"""Rhythms: in which slots the tasks of one microbatch would run, and the best of several for given costs.

A rhythm is a building block in the sense of arXiv 2405.15362: the forwards and input halves of one microbatch laid
out in slots, one task per slot, so that copies of it shifted by a period of slots never meet on a device. How far
apart a chunk's forward and input half lie tells how many activations a device holds, and how the slots interleave
tells who waits for whom. Here a rhythm only gives ranks: :mod:`pipec.schedules.greedy` orders by them under the
true costs and a cap on activations.

The rhythms of a schedule were found by searching gaps and windows over costs F : I : W of 1:1:1, 2:2:1, 1:2:1 and
those measured in arXiv 2401.10241, with and without hand-over costs. No rhythm is best for all costs, so a policy
has a few and takes the one that ends first.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from attrs import evolve, frozen

from pipec.costs import UNIT, Activations
from pipec.errors import ScheduleError
from pipec.ir import Chunk
from pipec.schedules.base import Op, Problem
from pipec.schedules.greedy import Keep, Outcome, Ranks, Rules, run
from pipec.schedules.limits import chunk_caps
from pipec.schedules.played import play
from pipec.schedules.polish import polish

REHEARSED = 20_000  # tasks from which on the rhythm is chosen on a smaller pipeline of the same kind
SMALL_DEVICES, SMALL_MICROBATCHES = 8, 32


@frozen
class Rhythm:
    """Gaps in slots, and the rules to run with.

    A *lap* is a pass over the devices: the n-th chunk of a device belongs to lap n.

    Attributes:
        forward: per lap from one chunk's F to the next chunk's; the last stands for all further laps.
        back: per lap from one chunk's I to the I of the chunk before.
        turns: from a lap's last F to the next lap's first, from the last F to the first I, and from a lap's I to the
            I of the lap before.
        slack: slots that a period has beyond three (F, I, W) per chunk of a device.
    """

    forward: tuple[int, ...]
    back: tuple[int, ...]
    turns: tuple[int, int, int]
    slack: int = 0
    window: float = inf
    patience: float = 0.0
    keep: Keep = Keep.MIX
    drain: bool = True


Maker = Callable[[Problem, list[int]], list[list[Op]] | None]  # from a problem and caps, None where it has none
Choice = Maker | tuple[Rhythm, bool]  # a rhythm, and whether to run it as if F = B = W = 1
SAFE = Rhythm((1,), (1,), (1, 1, 1), keep=Keep.ROOM)  # its runs never come to a stand


def rules(problem: Problem, rhythm: Rhythm, split: bool = True) -> Rules:
    """The rules of ``rhythm`` for the chunks of ``problem``."""
    ranks, period = slots(problem, rhythm)
    return Rules(ranks, period, rhythm.window, rhythm.patience, rhythm.keep, rhythm.drain, split)


def slots(problem: Problem, rhythm: Rhythm) -> tuple[Ranks, int]:
    """Slots of one microbatch's forwards and input halves per chunk, and the period.

    Every task takes the first slot after its gap that no other task of its device has in any period.
    """
    laps = laps_of(problem)
    period = 3 * (1 + max(laps)) + rhythm.slack
    taken: list[set[int]] = [set() for _ in range(problem.devices)]

    def place(chunk: int, slot: int) -> int:
        own = taken[problem.chunks[chunk].device]
        while slot % period in own:
            slot += 1
        own.add(slot % period)
        return slot

    fold, top, unfold = rhythm.turns
    forwards, inputs = [0] * len(laps), [0] * len(laps)
    slot = 0
    for chunk, lap in enumerate(laps):
        if chunk:
            slot += rhythm.forward[min(lap, len(rhythm.forward) - 1)] if laps[chunk - 1] == lap else fold
        slot = forwards[chunk] = place(chunk, slot)
    for chunk in reversed(range(len(laps))):
        if chunk == len(laps) - 1:
            slot += top
        else:
            lap = laps[chunk]
            slot += rhythm.back[min(lap, len(rhythm.back) - 1)] if laps[chunk + 1] == lap else unfold
        slot = inputs[chunk] = place(chunk, slot)
    return (forwards, inputs), period


def laps_of(problem: Problem) -> list[int]:
    """Per chunk how many earlier chunks its device has."""
    seen = [0] * problem.devices
    laps = []
    for chunk in problem.chunks:
        laps.append(seen[chunk.device])
        seen[chunk.device] += 1
    return laps


def best_order(
    problem: Problem, shares: float, rhythms: tuple[Rhythm, ...], split: bool = True, moves: int = 0,
    makers: tuple[Maker, ...] = (),
) -> list[list[Op]]:
    """The shortest lists of all rhythms and ``makers`` with at most ``shares`` activations per device.

    Every rhythm is run under the true costs and as if F = B = W = 1: a device that takes what is ready first may gain
    a moment and lose the rhythm. Ties go to the smaller span, then to makers, to true costs, to the earlier rhythm. On
    large problems the choice is made on fewer devices and microbatches. On small ones it is polished by so many
    ``moves`` (:mod:`pipec.schedules.polish`), unless there is a limit in bytes, of which polishing knows nothing, or no
    costs were given: seconds are not spent on times that stand for none.
    """
    caps = chunk_caps(problem, shares)
    if len(problem.chunks) * problem.microbatches * 3 <= REHEARSED:
        made = [outcome for _, outcome in _ranked(problem, caps, rhythms, split, makers)]
        in_bytes = problem.memory_limit is not None and not isinstance(problem.memory_limit, Activations)
        if split and not in_bytes and problem.costs != UNIT:
            return polish(problem, caps, made[0], [outcome.lists for outcome in made], moves).lists
        return made[0].lists
    small, small_caps = rehearsal(problem, caps)
    for choice, _ in _ranked(small, small_caps, rhythms, split, makers):
        lists = _lists(problem, caps, choice, split)
        if lists is not None:
            return lists
    raise ScheduleError(f"no order was found that holds {shares:g} activations per device; allow more")  # SAFE ends


def _ranked(
    problem: Problem, caps: list[int], rhythms: tuple[Rhythm, ...], split: bool, makers: tuple[Maker, ...] = ()
) -> list[tuple[Choice, Outcome]]:
    """Every choice that comes to an end, with its times under the costs of ``problem``, the best first."""
    levels = (False,) if levelled(problem) == problem else (False, True)
    choices: list[Choice] = [*makers, *((rhythm, level) for level in levels for rhythm in (*rhythms, SAFE))]
    made = []
    for choice in choices:
        if isinstance(choice, tuple) and not choice[1]:
            outcome = run(problem, caps, rules(problem, choice[0], split))
        else:
            lists = _lists(problem, caps, choice, split)
            outcome = None if lists is None else play(problem, lists)
        if outcome is not None:
            made.append((choice, outcome))
    return sorted(made, key=lambda pair: (round(pair[1].makespan, 9), round(pair[1].span, 9)))


def _lists(problem: Problem, caps: list[int], choice: Choice, split: bool) -> list[list[Op]] | None:
    if not isinstance(choice, tuple):
        return choice(problem, caps)
    rhythm, level = choice
    outcome = run(levelled(problem) if level else problem, caps, rules(problem, rhythm, split))
    return None if outcome is None else outcome.lists


def levelled(problem: Problem) -> Problem:
    """The problem with equal stages, F = B = W and nothing for hand-overs."""
    costs = evolve(problem.costs, forward=1.0, backward_input=1.0, backward_weight=1.0, latency=0.0, stages={})
    return evolve(problem, costs=costs)


def rehearsal(problem: Problem, caps: list[int]) -> tuple[Problem, list[int]]:
    """A smaller problem of the same kind: evenly chosen devices with all their chunks, caps in proportion."""
    count = min(problem.devices, SMALL_DEVICES)
    kept = [d * problem.devices // count for d in range(count)]
    number = {device: n for n, device in enumerate(kept)}
    chosen = [chunk for chunk in problem.chunks if chunk.device in number]
    chunks = tuple(Chunk(n, number[chunk.device], chunk.stages) for n, chunk in enumerate(chosen))
    edges = tuple((n, n + 1) for n in range(len(chunks) - 1))
    microbatches = min(problem.microbatches, SMALL_MICROBATCHES)
    small = evolve(problem, chunks=chunks, devices=count, microbatches=microbatches, edges=edges)
    return small, [max(len(small.on(n)), round(caps[d] * count / problem.devices)) for n, d in enumerate(kept)]
