"""An asynchronous plan as instructions: those of every step, of a flush after any step, and what each task reads.

Slots are numbered so that the microbatches of one value stand in a row: when the steady period begins anew, all that
is alive moves N places on at once, and the same instructions fit again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from copy import copy
from fractions import Fraction

import numpy as np
from attrs import evolve, field, frozen

from pipec.errors import RunError
from pipec.ir import Buffer, Kind, Plan
from pipec.periods import Periods, Rows, minibatch_of, periods
from pipec.rules import newest_by_row, rule_of
from pipec.rules.base import READERS
from pipec.runtime.asynchronous.rules import Delays, Half, half_of
from pipec.runtime.program import NOWHERE, Op, Route, Slot, Slots, instructions


class RowSlots(Slots):
    """Slots in which microbatch m of anything stands m places after its microbatch 0."""

    def __init__(self, microbatches: int) -> None:
        super().__init__()
        self._microbatches = microbatches
        self._rows: dict[tuple[int, int], int] = {}

    def of(self, kind: int, ref: int, microbatch: int) -> Slot:
        row = self._rows.setdefault((kind, ref), len(self._rows) * self._microbatches)
        return self.number.setdefault((kind, ref, microbatch), row + microbatch)

    @property
    def size(self) -> int:
        return len(self._rows) * self._microbatches


@frozen
class Reading:
    """What a task reads of its stage's weights.

    Attributes:
        version: as the plan says.
        ahead: updates from that version to the one that the microbatch's BACKWARD reads.
        hooked: of the task that makes the graph: its backward is given weights, see :mod:`.saved`.
        exact: the backward reads the weights that made its graph.
        drops: versions that nobody reads after this task.
    """

    version: int
    ahead: int = 0
    hooked: bool = False
    exact: bool = True
    drops: tuple[int, ...] = ()


@frozen(eq=False)
class Segment:
    """The tasks of one step or flush: per device in order; and the microbatches that are finished after it."""

    ops: tuple[tuple[Op, ...], ...]
    finished: tuple[int, ...]
    sent: dict[Route, int]  # hand-overs since the start of the plan, by route


@frozen(eq=False)
class Steps:
    """The instructions of an asynchronous plan.

    Attributes:
        segments: by step, up to the first steady one, which is run again and again.
        readings: per task, None where it reads no weights.
        keeps: tasks of UPDATEs whose replaced version is still read.
        updates: per minibatch.
    """

    plan: Plan
    half: Half
    delays: tuple[Delays, ...]
    staleness: tuple[Fraction, ...]
    segments: tuple[Segment, ...]
    readings: tuple[Reading | None, ...]
    keeps: frozenset[int]
    slots: tuple[int, ...]
    routes: tuple[Route, ...]
    period: dict[Route, int]  # hand-overs per steady step, by route
    every: int  # backwards per update
    ends: tuple[int, ...]  # per minibatch the step of its last UPDATE, or as many as there are minibatches: the flush
    places: tuple[dict[tuple[int, int, int], Slot], ...]  # per device the slots of (Buffer, ref, microbatch)
    _made: tuple[Op, ...]
    _periods: Periods
    _flushes: dict[int, Segment] = field(factory=dict)

    @property
    def step_of(self) -> Rows:
        """Per task of the plan the step that runs it."""
        return self._periods.step

    @property
    def updates(self) -> int:
        return self.plan.minibatch // self.every

    def flush(self, minibatches: int) -> Segment:
        """What is left to run after that many steps, at most ``len(self.segments)``."""
        if minibatches not in self._flushes:
            rows = self._periods.flush(minibatches)
            finished = [m for m, step in enumerate(_last_steps(self.plan, self._periods).tolist())
                        if m < minibatches * self.plan.minibatch and step >= minibatches]
            made = dict(enumerate(self._made)) | self._received_in_flush(rows, self.segments[minibatches - 1].sent)
            self._flushes[minibatches] = _segment(self.plan, made, rows, finished, {})
        return self._flushes[minibatches]

    def _received_in_flush(self, rows: Rows, before: dict[Route, int]) -> dict[int, Op]:
        """The tasks of a flush that wait for copies made in it: the plan counts copies of later minibatches too.

        ``before``: hand-overs by route until the flush.
        """
        sent, place = dict(before), {}
        for row in rows.tolist():
            op = self._made[row]
            if op.kind is Kind.COPY and op.route is not NOWHERE:
                sent[op.route] += 1
                place[row] = op.route, sent[op.route]
        made = {}
        for row in rows.tolist():
            waits = self.plan.waits.of(row).tolist()
            if any(need in place for need in waits):
                made[row] = op = copy(self._made[row])
                own = [place[need] for need in waits if need in place and place[need][0][1] == op.device]
                earlier = [(route, count) for route, count in op.receives if count <= before[route]]
                op.receives = (*earlier, *own)
        return made


def build_steps(plan: Plan, late: float | None = None) -> Steps:
    """Translate an asynchronous plan.

    Args:
        late: how many updates older the weights of forwards are than it says, on average, where they may be; else None.

    Raises:
        RunError: it has a task that asynchronous steps do not run, or no steady period.
    """
    kinds = {Kind(kind) for kind in np.unique(plan.table.kind)}
    strange = sorted(kind.name for kind in kinds & {Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.REDUCE})
    if strange:
        raise RunError(f"asynchronous plans are run with whole backwards; schedule {plan.schedule!r} has "
                       f"{', '.join(strange)}")
    made = periods(plan)
    if made.steady >= plan.minibatches:
        raise RunError(f"schedule {plan.schedule!r} has no steady period over {plan.minibatches} minibatches, so it "
                       "cannot be run for longer; let it order the same pattern for every minibatch")
    slots = [RowSlots(plan.microbatches) for _ in range(plan.devices)]
    ops = tuple(instructions(plan, slots))
    rule = rule_of(plan)
    delays, staleness = _delays(plan)
    half = half_of(rule, delays)
    if late is not None and not half.follows:
        half = half_of(rule, [evolve(own, forward=own.forward + late) for own in delays])
    last = _last_steps(plan, made).tolist()
    segments, sent = [], dict.fromkeys({op.route for op in ops if op.kind is Kind.COPY} - {NOWHERE}, 0)
    for step in range(made.steady + 1):
        finished = [m for m, own in enumerate(last) if own == step]
        segments.append(_segment(plan, ops, made.ids(step), finished, sent))
    steady = segments[-1]
    period = {route: sum(op.kind is Kind.COPY and op.route == route for row in steady.ops for op in row)
              for route in sent}
    return Steps(plan, half, delays, staleness, tuple(segments), _readings(plan, half, late is not None), _keeps(plan),
                 tuple(own.size for own in slots), tuple(sorted(sent)), period, plan.update_every, _ends(plan, made),
                 tuple(own.number for own in slots), ops, made)


def _segment(
    plan: Plan, ops: Mapping[int, Op] | Sequence[Op], rows: Rows, finished: Sequence[int], sent: dict[Route, int]
) -> Segment:
    """``sent`` counts on over the segments of a plan."""
    lanes: list[list[Op]] = [[] for _ in range(plan.devices)]
    for row in rows.tolist():
        op = ops[row]
        lanes[op.device].append(op)
        if op.kind is Kind.COPY and op.route in sent:
            sent[op.route] += 1
    return Segment(tuple(map(tuple, lanes)), tuple(finished), dict(sent))


def _last_steps(plan: Plan, made: Periods) -> Rows:
    """Per microbatch the step of its last task beside UPDATE and COPY."""
    table = plan.table
    last = np.full(plan.microbatches, -1, np.int64)
    rows = np.isin(table.kind, READERS)
    np.maximum.at(last, table.microbatch[rows], made.step[rows])
    return last


def _ends(plan: Plan, made: Periods) -> tuple[int, ...]:
    """Per minibatch the step of its last UPDATE."""
    rows, last = plan.table.kind == Kind.UPDATE, np.full(plan.minibatches, -1, np.int64)
    np.maximum.at(last, minibatch_of(plan)[rows], made.step[rows])
    return tuple(last.tolist())


def _delays(plan: Plan) -> tuple[tuple[Delays, ...], tuple[Fraction, ...]]:
    """Per stage the mean staleness over the last minibatch's microbatches, the first of which no version is missing."""
    table, stages = plan.table, len(plan.graph.stages)
    newest = newest_by_row(table)
    own = table.microbatch >= plan.microbatches - plan.minibatch
    delays, staleness = [], []
    for stage in range(stages):
        mine = own & (table.stage == stage)
        back, again = (mine & (table.kind == kind) for kind in (Kind.BACKWARD, Kind.RECOMPUTE))
        read = {kind: int(table.version[mine & (table.kind == kind)].sum()) for kind in (Kind.FORWARD, Kind.BACKWARD)}
        if not back.any():
            delays.append(Delays(0.0))
            staleness.append(Fraction(0))
            continue
        count = int(back.sum())
        recomputed = Fraction(int(table.version[back].sum() - table.version[again].sum()), count) if again.any() else 0
        delays.append(Delays(float(Fraction(read[Kind.BACKWARD] - read[Kind.FORWARD], count)), float(recomputed)))
        staleness.append(Fraction(int(newest[back].sum()) - read[Kind.FORWARD], count))
    return tuple(delays), tuple(staleness)


def _keeps(plan: Plan) -> frozenset[int]:
    own = plan.buffers.kind == Buffer.WEIGHT
    return frozenset(plan.buffers.writer[own].tolist())


def _readings(plan: Plan, half: Half, delayed: bool) -> tuple[Reading | None, ...]:
    table, buffers = plan.table, plan.buffers
    drops: dict[int, list[int]] = defaultdict(list)
    for row in np.flatnonzero(buffers.kind == Buffer.WEIGHT).tolist():
        drops[int(buffers.free[row])].append(int(buffers.microbatch[row]))
    newest, version = newest_by_row(table).tolist(), table.version.tolist()
    kinds, stages, items = table.kind.tolist(), table.stage.tolist(), table.microbatch.tolist()
    backward, again = {}, set()
    for task, kind in enumerate(kinds):
        if kind == Kind.BACKWARD:
            backward[stages[task], items[task]] = task
        elif kind == Kind.RECOMPUTE:
            again.add((stages[task], items[task]))
    made: list[Reading | None] = []
    for task, kind in enumerate(kinds):
        key = stages[task], items[task]
        if kind not in READERS:
            made.append(None)
            continue
        later, own = backward.get(key), tuple(drops.get(task, ()))
        if later is None or kind == Kind.BACKWARD or (kind == Kind.FORWARD and key in again):
            ahead = 0 if later is None else version[later] - version[task]
            made.append(Reading(version[task], ahead, drops=own))
            continue
        exact = version[later] == version[task] and not half.makes(key[0]) and (half.follows or not delayed)
        live = version[task] == newest[task]
        hooked = not exact or (live and newest[later] > newest[task])
        made.append(Reading(version[task], version[later] - version[task], hooked, exact, own))
    return tuple(made)
