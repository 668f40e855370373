"""Races in a plan: two tasks that touch the same memory while nothing keeps them in order.

Lanes run beside each other; only the order within a lane and the plan's waits hold them. The detector plays the most
hostile of all legal orders: it holds one task back for as long as the plan allows, lets everything else run, and looks
whether a task that needs the one held back has come by. What runs before a task in any legal order does so in this
one, so holding back each task in turn finds every race, whatever the length of the plan.

What tasks touch is worked out from the graph alone: a value is written by its forward or a copy and read by the tasks
of its readers; a gradient is added to by the backwards of the readers on its device; every buffer is given back by the
task that the plan names, and by then everybody must be done with it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np
from attrs import field, frozen

from pipec.errors import PlanError, Problem, RaceError, raise_all
from pipec.ir import BACKWARDS, CARRIES, FROM_HOST, Buffer, Kind, Lane, Plan
from pipec.rules.base import READERS
from pipec.verify.facts import Facts
from pipec.verify.flow import deadlock_story
from pipec.verify.form import form, lane_name
from pipec.verify.reach import Reach

Memory = tuple[int, int, int, int, int]  # Buffer, stage or value, item, device, device that it came from or -1


@frozen
class Race:
    """Two tasks without an order between them.

    Attributes:
        first, second: tasks; the first must end before the second starts, and nothing makes it.
        what: the memory and what goes wrong with it.
        order: a legal order of tasks that runs ``second`` and not ``first``; the last one is ``second``.
    """

    first: int
    second: int
    what: str
    order: tuple[int, ...]


@frozen(eq=False)
class Touched:
    """Who writes and who reads a piece of memory."""

    writers: list[int] = field(factory=list)
    readers: list[int] = field(factory=list)


def find_races(plan: Plan) -> list[Race]:
    """Every pair of tasks that touch the same memory in no fixed order, by the task that comes too early.

    Raises:
        PlanError: the plan's numbers name nothing, or it deadlocks, so that nothing can run.
    """
    raise_all(f"plan {plan.graph.name!r}", [Problem(f"form: {text}") for text in form(plan)], PlanError)
    reach = Reach(plan)
    if reach.order is None:
        raise PlanError(deadlock_story(plan, reach, reach.edges))
    before = _before(plan)
    after: list[list[int]] = [[] for _ in before]
    for task, needs in enumerate(before):
        for need in needs:
            after[need].append(task)
    place = np.empty(reach.size, np.int64)
    place[reach.order] = np.arange(reach.size)
    places = place.tolist()
    wanted: dict[int, dict[int, str]] = defaultdict(dict)
    for first, second, what in orders_needed(plan):
        wanted[first].setdefault(second, what)
    found = []
    for first, seconds in wanted.items():
        free = set(seconds) - _held_with(first, after, places, max(places[second] for second in seconds))
        found += [Race(first, second, seconds[second], _witness(second, before, places)) for second in free]
    return sorted(found, key=lambda race: (places[race.second], places[race.first]))


def check_races(plan: Plan) -> int:
    """The number of pairs of tasks that touch the same memory, each in a fixed order.

    Raises:
        RaceError: listing the races.
    """
    raise_all(
        f"plan {plan.graph.name!r}", [Problem(told(plan, race)) for race in find_races(plan)], RaceError, most=16
    )
    return len({pair[:2] for pair in orders_needed(plan)})


def told(plan: Plan, race: Race) -> str:
    """A race in words, with the last tasks of an order in which it happens."""
    table = plan.table
    shown = " ".join(str(table.task(task)) for task in race.order[-6:])
    return (
        f"{_placed(plan, race.second)} {race.what} {_placed(plan, race.first)}: no lane and no wait keeps them in "
        f"order; let {table.task(race.second)} wait for {table.task(race.first)}. It may run first, as in the legal "
        f"order {'... ' if len(race.order) > 6 else ''}{shown}"
    )


def _placed(plan: Plan, task: int) -> str:
    made = plan.table.task(task)
    if made.host == "from":
        return f"{made} ({lane_name(Lane.IN)} lane of device {made.peer})"
    lane = 1 if made.kind is Kind.COPY else 0
    return f"{made} ({lane_name(lane)} lane of device {made.device})"


def _before(plan: Plan) -> list[list[int]]:
    """Per task what must have ended when it starts: its waits, and the tasks before it on its lanes."""
    made: list[list[int]] = [plan.waits.of(task).tolist() for task in range(len(plan.table))]
    for lanes in plan.lanes:
        for ids in lanes:
            for earlier, later in zip(ids[:-1].tolist(), ids[1:].tolist(), strict=True):
                made[later].append(earlier)
    return made


def _held_with(first: int, after: list[list[int]], places: list[int], last: int) -> set[int]:
    """The tasks that cannot run while ``first`` is held back, those beyond place ``last`` left out."""
    held, stack = {first}, [first]
    while stack:
        for task in after[stack.pop()]:
            if task not in held and places[task] <= last:
                held.add(task)
                stack.append(task)
    return held


def _witness(second: int, before: list[list[int]], places: list[int]) -> tuple[int, ...]:
    needed, stack = {second}, [second]
    while stack:
        for task in before[stack.pop()]:
            if task not in needed:
                needed.add(task)
                stack.append(task)
    return tuple(sorted(needed, key=places.__getitem__))


# -- what must come before what ----------------------------------------------------------------------------------


def orders_needed(plan: Plan) -> Iterator[tuple[int, int, str]]:
    """(first, second, what is wrong when the second does not wait for the first) for all memory of the plan."""
    touched = memory_of(plan)
    for memory, used in touched.items():
        name = _memory_name(plan, memory)
        for writer in used.writers:
            for reader in used.readers:
                yield writer, reader, f"reads {name} before it is written by"
    for memory, free in _frees(plan):
        used = touched.get(memory, Touched())
        name = _memory_name(plan, memory)
        for task in {*used.writers, *used.readers} - {free}:
            verb = "used" if task in used.readers else "written"
            yield task, free, f"frees {name} while it is still to be {verb} by"
    yield from _early(plan)
    yield from _reduces(plan)
    yield from _versions(plan) if plan.asynchronous else _updates(plan)


EARLY = "comes back from host memory before the end of"


def _early(plan: Plan) -> Iterator[tuple[int, int, str]]:
    """A copy back from host memory takes memory that only counts as free one task ahead of its reader."""
    if not any(info.host for info in plan.graph.values):
        return
    facts = Facts(plan)
    for value, info in enumerate(facts.graph.values):
        for device, stages in facts.hosted_on(value).items():
            back = facts.copy(value, FROM_HOST, int(facts.home[info.producer]), device)
            for gate, copy in zip(facts.gate(device, stages).tolist(), back.tolist(), strict=True):
                if gate >= 0 and copy >= 0:
                    yield gate, copy, EARLY


def memory_of(plan: Plan) -> dict[Memory, Touched]:
    """Who writes and reads every activation, value and gradient, by the graph."""
    rows, facts = _Rows(plan), Facts(plan)
    again, hosted = facts.again, [facts.hosted_on(value) for value in range(len(plan.graph.values))]
    touched: dict[Memory, Touched] = defaultdict(Touched)
    for (stage, item), uses in rows.of_stage.items():
        device = uses.device
        if uses.backwards:
            saved = touched[Buffer.ACTIVATION, stage, item, device, -1]
            saved.writers.append(uses.forwards[-1])
            saved.readers.extend(uses.backwards)
        for value in plan.graph.stages[stage].gives:
            touched[Buffer.VALUE, value, item, device, -1].writers.append(uses.forwards[0])
            if again.get(value):  # a segment's readers take what is computed anew
                touched[Buffer.RECOMPUTED, value, item, device, -1].writers.extend(uses.forwards[1:])
        for value in plan.graph.stages[stage].reads:
            kind = Buffer.FETCHED if device in hosted[value] else Buffer.VALUE
            first = touched[kind, value, item, device, -1].readers
            first.append(uses.forwards[0])
            anew = touched[Buffer.RECOMPUTED, value, item, device, -1].readers
            (anew if stage in again.get(value, ()) else first).extend(uses.forwards[1:] + uses.backwards[:1])
            producer = plan.graph.values[value].producer
            home = rows.of_stage.get((producer, item))
            if uses.backwards and home is not None and home.backwards:
                touched[Buffer.GRADIENT, value, item, device, device].writers.append(uses.backwards[0])
                if home.device == device:
                    touched[Buffer.GRADIENT, value, item, device, device].readers.append(home.backwards[0])
    for copy, (value, item, gradient, source, target) in rows.copies.items():
        kind, there = CARRIES[gradient]
        sender = source if kind is Buffer.GRADIENT else -1
        touched[kind, value, item, source, sender].readers.append(copy)
        arrived = touched[there, value, item, target, sender]
        arrived.writers.append(copy)
        home = rows.of_stage.get((plan.graph.values[value].producer, item))
        if kind is Buffer.GRADIENT and home is not None:
            arrived.readers.extend(home.backwards[:1])
    return touched


@frozen(eq=False)
class _Uses:
    """The tasks of one stage on one item: forward and recompute, then the backward or its halves."""

    device: int
    forwards: list[int] = field(factory=list)
    backwards: list[int] = field(factory=list)


class _Rows:
    """Where the tasks of a plan are."""

    def __init__(self, plan: Plan) -> None:
        table = plan.table
        outer = table.replica.astype(np.int64) * plan.slices + table.slice
        items = (outer * plan.microbatches + table.microbatch).tolist()
        self.of_stage: dict[tuple[int, int], _Uses] = {}
        self.copies: dict[int, tuple[int, int, int, int, int]] = {}
        columns = (table.kind, table.stage, table.device, table.value, table.gradient, table.peer)
        rows = zip(*(column.tolist() for column in columns), items, strict=True)
        found = list(enumerate(rows))
        for task, (kind, stage, device, value, gradient, peer, item) in sorted(found, key=lambda row: row[1][0]):
            if kind == Kind.COPY:
                self.copies[task] = value, item, gradient, device, peer
            elif kind in (Kind.FORWARD, Kind.RECOMPUTE):
                self.of_stage.setdefault((stage, item), _Uses(device)).forwards.append(task)
            elif kind in BACKWARDS:
                self.of_stage.setdefault((stage, item), _Uses(device)).backwards.append(task)
        for uses in self.of_stage.values():
            if not uses.forwards:
                raise PlanError("the plan has a backward without its forward; plan.verify() says which")


def _frees(plan: Plan) -> Iterator[tuple[Memory, int]]:
    buffers, table = plan.buffers, plan.table
    outer = buffers.replica.astype(np.int64) * plan.slices + buffers.slice
    items = outer * plan.microbatches + buffers.microbatch
    source = np.where(buffers.kind == Buffer.GRADIENT, table.device[buffers.writer], -1)
    columns = (buffers.kind, buffers.ref, items, buffers.device, source, buffers.free)
    for kind, ref, item, device, sender, free in zip(*(column.tolist() for column in columns), strict=True):
        yield (kind, ref, item, device, sender), free


def _reduces(plan: Plan) -> Iterator[tuple[int, int, str]]:
    """A REDUCE reads the sum of its stage's gradients, which every backward of the stage adds to."""
    table = plan.table
    backward = np.isin(table.kind, BACKWARDS)
    for reduce in np.flatnonzero(table.kind == Kind.REDUCE).tolist():
        for task in np.flatnonzero(backward & (table.stage == table.stage[reduce])).tolist():
            yield task, reduce, "adds up gradients without that of"


def _updates(plan: Plan) -> Iterator[tuple[int, int, str]]:
    """An UPDATE writes parameters that backwards still read: in a synchronous plan those of all devices."""
    table = plan.table
    updates = np.flatnonzero(table.kind == Kind.UPDATE).tolist()
    stages = table.stage[updates].tolist()
    backward = np.isin(table.kind, BACKWARDS)
    for update, stage in zip(updates, stages, strict=True):
        own = backward & (table.stage == stage) if plan.update_early and stage >= 0 else backward
        for lanes in plan.lanes:
            rows = lanes[Lane.COMPUTE][own[lanes[Lane.COMPUTE]]]
            if len(rows):  # those before the last one on a lane come before that
                yield int(rows[-1]), update, "changes parameters while their gradients are still to come from"


def _versions(plan: Plan) -> Iterator[tuple[int, int, str]]:
    """In an asynchronous plan an UPDATE writes the weights that tasks of its stage read: those of the version before
    must be past, unless that is kept, those of the version it makes must wait; and it uses up the gradients so far."""
    table, buffers, every = plan.table, plan.buffers, plan.update_every
    kept = {
        (int(buffers.ref[row]), int(buffers.microbatch[row])): (int(buffers.writer[row]), int(buffers.free[row]))
        for row in np.flatnonzero(buffers.kind == Buffer.WEIGHT).tolist()
    }
    columns = (table.kind, table.stage, table.version, table.microbatch)
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    replaces = {(stage, version): task for task, (kind, stage, version, _) in enumerate(rows) if kind == Kind.UPDATE}
    numbered = {(stage, number): task for task, (kind, stage, _, number) in enumerate(rows) if kind == Kind.UPDATE}
    for task, (kind, stage, version, microbatch) in enumerate(rows):
        if kind not in READERS and kind != Kind.UPDATE:
            continue
        maker, end = replaces.get((stage, version - 1)), replaces.get((stage, version))
        copy = kept.get((stage, version))
        if maker is not None:
            yield maker, task, f"reads weight version {version} before it is made by"
        if kind == Kind.UPDATE:
            if copy is not None and copy[0] != task:
                yield copy[0], task, f"replaces weight version {version} before it is copied by"
            continue
        if copy is not None and copy[1] != task:
            yield task, copy[1], f"frees w{stage}[{version}] while it is still to be read by"
        if copy is None and end is not None:
            yield task, end, f"replaces weight version {version}, which is still to be read by"
        if kind in BACKWARDS:
            own, before = numbered.get((stage, microbatch // every)), numbered.get((stage, microbatch // every - 1))
            if own is not None:
                yield task, own, "steps the optimizer without the gradient that is still to be made by"
            if before is not None:
                yield before, task, "adds to gradients that are still to be used by"


def _memory_name(plan: Plan, memory: Memory) -> str:
    kind, ref, item, device, source = memory
    rest, microbatch = divmod(item, plan.microbatches)
    replica, slice_ = divmod(rest, plan.slices)
    number = f"{microbatch}" + (f".{slice_}" if slice_ else "") + (f"~{replica}" if replica else "")
    came = f" from device {source}" if kind == Buffer.GRADIENT and source != device else ""
    return f"{Buffer(kind).letter}{ref}[{number}]{came} on device {device}"
