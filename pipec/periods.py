"""The steps of an asynchronous plan: which tasks run when minibatch k is fed, and what is left for the flush.

Step k runs every task that needs minibatch k, directly or through what comes before it in its lane or must end before
it, and no later one, but for the last ``behind`` tasks of each device, which later steps begin with (see
:mod:`pipec.passes.behind`). Once the pipeline is full, every step is the one before with N microbatches and one
minibatch's updates added: the steady period. What the last minibatches of a plan leave behind is its epilogue, the
flush.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from attrs import frozen

from pipec.errors import PlanError
from pipec.ir import TABLE_COLUMNS, Column, Kind, Lane, Plan, Table
from pipec.rules.base import READERS, newest_by_row, update_every
from pipec.segments import recomputed_values
from pipec.spec import Graph

Rows = npt.NDArray[np.int64]


def fed(graph: Graph, table: Table, minibatch: int) -> Rows:
    """Per task the minibatch that it reads from outside: that of a FORWARD without producers; 0 for all others."""
    roots = np.asarray([not stage.reads for stage in graph.stages] + [False])
    return np.where((table.kind == Kind.FORWARD) & roots[table.stage], table.microbatch // minibatch, 0)


def steps(order: Rows, start: Column, needs: Column, given: Rows) -> tuple[Rows, Rows]:
    """Per task the largest of ``given`` over it and all before it, and how many tasks of that step it comes after.

    Args:
        order: the tasks in an order that keeps what they need.
        start, needs: per task the tasks right before it, those of its lanes included.
    """
    bounds, ids = start.tolist(), needs.tolist()
    step, level = given.tolist(), [0] * len(order)
    for task in order.tolist():
        own, depth = step[task], 0
        for k in range(bounds[task], bounds[task + 1]):
            need = ids[k]
            if step[need] > own:
                own, depth = step[need], level[need] + 1
            elif step[need] == own and level[need] >= depth:
                depth = level[need] + 1
        step[task], level[task] = own, depth
    return np.asarray(step, np.int64), np.asarray(level, np.int64)


def moved(step: Rows, lists: Sequence[Rows], behind: Sequence[int], count: int) -> Rows:
    """The steps that run the tasks when each device stays ``behind`` so many tasks at the end of every step.

    Args:
        step: per task the step that runs it when nothing is left, of ``count``.
        lists: per device its compute tasks in order; tasks in none of them keep their step.

    Returns:
        Per task its step; ``count`` for those that no step gets to.
    """
    made = step.copy()
    for own, left in zip(lists, behind, strict=True):
        ends = np.cumsum(np.bincount(np.minimum(step[own], count), minlength=count + 1))[:count] - left
        made[own] = np.searchsorted(ends, np.arange(len(own)), side="right")
    return np.asarray(made, np.int64)


@frozen(eq=False)
class Periods:
    """The steps of a plan.

    Attributes:
        step: per task the step that runs it, 0..minibatches-1; ``minibatches`` for those of the epilogue.
        steady: the first step of the steady period; as many as there are minibatches when there is none.
        minibatches: how many the plan lays out.
    """

    plan: Plan
    step: Rows
    steady: int
    minibatches: int

    def ids(self, step: int) -> Rows:
        """The tasks of a step, ascending; of the epilogue for ``step == minibatches``."""
        return np.flatnonzero(self.step == step)

    def flush(self, minibatches: int) -> Rows:
        """The tasks left to run when the pipeline is flushed after that many minibatches, ascending.

        Those of minibatches fed, at most ``self.minibatches``, that no step has run; after more, the epilogue moved on.
        """
        return np.flatnonzero((minibatch_of(self.plan) < minibatches) & (self.step >= minibatches))


def periods(plan: Plan) -> Periods:
    """The steps of ``plan``, of which a synchronous one has a single one and no epilogue.

    Raises:
        PlanError: the plan deadlocks.
    """
    if not plan.asynchronous:
        return Periods(plan, np.zeros(len(plan), np.int64), 0, 1)
    from pipec.passes.draft import data_edges, index_of, join, to_csr
    from pipec.verify import execution_order

    lanes = [ids.astype(np.int64) for lanes in plan.lanes for ids in lanes]
    waits = np.repeat(np.arange(len(plan)), np.diff(plan.waits.start)), plan.waits.ids.astype(np.int64)
    edges = to_csr(join([waits, *((ids[1:], ids[:-1]) for ids in lanes)]), len(plan))
    order = np.asarray(execution_order(plan), np.int64)
    given = fed(plan.graph, plan.table, plan.minibatch)
    if plan.behind:
        compute = [own[Lane.COMPUTE].astype(np.int64) for own in plan.lanes]
        # without copies, whose order on their lanes follows from the steps
        data = data_edges(plan.graph, index_of(plan), recomputed_values(plan.graph, plan.recompute))
        free = to_csr(join([data, *((own[1:], own[:-1]) for own in compute)]), len(plan))
        given = moved(steps(order, *free, given)[0], compute, plan.behind, plan.minibatches)
    step, _ = steps(order, *edges, given)
    last = plan.minibatches - 1
    for ids in lanes:
        own = step[ids]
        # the last minibatch has no successor whose absence would show: its step is as long as the one before
        beyond = np.flatnonzero(own >= last)[int((own == last - 1).sum()) :]
        step[ids[beyond]] = last + 1
    rows = np.concatenate(lanes)  # lane by lane, so that the order in each of them counts
    steady = first_steady(plan.table.take(rows), step[rows], plan.minibatch, plan.minibatches)
    return Periods(plan, step, steady, plan.minibatches)


def minibatch_of(plan: Plan) -> Rows:
    """Per task the minibatch that its microbatch, or the last microbatch of its update, belongs to."""
    table = plan.table
    last = np.where(table.kind == Kind.UPDATE, (table.microbatch + 1) * plan.update_every - 1, table.microbatch)
    return np.asarray(last // plan.minibatch, np.int64)


def first_steady(table: Table, step: Rows, minibatch: int, count: int) -> int:
    """The first of ``count`` steps from which on each is the one before, one minibatch later; ``count`` if none is.

    A steady step has as many tasks as a minibatch: one that left more to the flush with every step would lose them.
    """
    stages = np.unique(table.stage[table.kind == Kind.UPDATE])
    microbatches = int(table.microbatch[table.kind == Kind.FORWARD].max(initial=0)) + 1
    updates = max(1, minibatch // update_every(table, microbatches))
    needed = ~np.isin(table.kind, (Kind.RECOMPUTE, Kind.COPY))
    whole = np.bincount(step[needed], minlength=count) * microbatches == int(needed.sum()) * minibatch
    parts = [_relative(table.take(np.flatnonzero(step == k)), k, minibatch, updates, stages) for k in range(count)]
    first = count
    for k, (before, own) in reversed(list(enumerate(itertools.pairwise(parts)))):
        if not whole[k + 1] or before.shape != own.shape or (before != own).any():
            break
        first = k
    return first


def last_reader(table: Table, step: Rows, minibatch: int) -> int:
    """How many minibatches after the step that replaces a weight version the last minibatch that reads it is fed.

    A steady step can be run again and again when the plan lays out that many more: only then it shows until when the
    versions that it replaces are kept. 0 where all readers are in flight, as with stashed weights.
    """
    update, newest = np.flatnonzero(table.kind == Kind.UPDATE), newest_by_row(table)
    reader = np.flatnonzero(np.isin(table.kind, READERS) & (newest > table.version) & (table.version >= 0))
    if not len(update) or not len(reader):
        return 0
    replaced = np.full((int(table.stage.max()) + 1, int(newest.max()) + 1), np.iinfo(np.int64).max, np.int64)
    replaced[table.stage[update], newest[update]] = step[update]
    after = table.microbatch[reader] // minibatch - replaced[table.stage[reader], table.version[reader]]
    return max(0, int(after.max()))


def _relative(part: Table, step: int, minibatch: int, updates: int, updated: Column) -> Rows:
    """A step's tasks as rows of numbers, counted from its own minibatch and its ``updates`` of stages ``updated``."""
    update = part.kind == Kind.UPDATE
    columns = {name: getattr(part, name).astype(np.int64) for name in TABLE_COLUMNS}
    columns["microbatch"] -= step * np.where(update, updates, minibatch)
    reads = np.isin(part.stage, updated) & (part.kind != Kind.COPY)
    columns["version"] -= np.where(reads, step * updates, 0)
    return np.stack([columns[name] for name in TABLE_COLUMNS])


def settled(plan: Plan) -> Periods:
    """The steps of an asynchronous plan that has a steady period.

    Raises:
        PlanError: it is synchronous, or no step equals the one before.
    """
    made = periods(plan)
    if not plan.asynchronous or made.steady >= made.minibatches:
        raise PlanError(f"plan {plan.graph.name!r} has no steady period")
    return made
