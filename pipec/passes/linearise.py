"""Linearise: one global order that keeps every device's own and runs everything a task needs before it.

Task ids are positions in this order, so later passes and every reader of the plan need no search.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import evolve

from pipec.costs import Costs
from pipec.errors import PlanError, ScheduleError
from pipec.ir import Column, Kind, Table
from pipec.passes.behind import Clocked, behind, ticks_of
from pipec.passes.draft import Draft, data_edges, index_of, join, leaders, to_csr
from pipec.periods import fed, moved, steps
from pipec.topology import clock

Rows = npt.NDArray[Any]


def linearise(draft: Draft, costs: Costs | None = None) -> Draft:
    """Sort the rows by when they end if a whole backward takes two ticks and everything else one.

    An overlap group is one task here, of all its members' needs and ticks, so that its members end up side by side
    and could run at once. Groups are numbered in the order made.

    An asynchronous draft is sorted by the step that runs each row first (see :mod:`pipec.periods`), and inside a step
    by what the rows need of each other there: so every steady step has the same order. ``costs`` tell where a step is
    best cut, see :mod:`pipec.passes.behind`.

    Raises:
        PlanError: on a deadlock, with the task at which every device stands and what it waits for.
        ScheduleError: a task needs another of its group, or the draft is asynchronous and has groups.
    """
    table = draft.table
    if draft.rule is not None and table.group.any():
        pair = "&".join(str(table.task(int(i))) for i in _members(table, int(np.flatnonzero(table.group)[0])))
        raise ScheduleError(
            f"schedule {draft.schedule!r} is asynchronous, but orders {pair} as one; a step could end between them, so "
            "only synchronous schedules have overlaps. Order the tasks one after another"
        )
    leader = leaders(table)
    task, need = data_edges(draft.graph, index_of(draft), draft.again)
    _check_independent(draft, task, need, leader)
    start, needs = to_csr((leader[task], leader[need]), len(table))
    lists = [np.flatnonzero((table.device == d) & (leader == np.arange(len(table)))).tolist()
             for d in range(draft.devices)]
    ticks = np.bincount(leader, np.where(table.kind == Kind.BACKWARD, 2, 1), len(table)).astype(np.int64)
    ends, reached = clock(lists, start, needs, ticks.tolist())
    ends = ends[leader]
    if len(table) and not ends.all():
        chunk_of = {stage: chunk.index for chunk in draft.chunks for stage in chunk.stages}
        several = len(chunk_of) > len(draft.chunks)
        raise PlanError(deadlock(
            f"schedule {draft.schedule!r}", table, lists, reached, start, needs, ends,
            chunk_of=chunk_of if several else None,
        ))
    if draft.rule is None:
        return evolve(draft, table=_numbered(table.take(np.lexsort((table.device, ends)))))
    return _in_steps(draft, Clocked(
        [np.asarray(own, np.int64) for own in lists], start, needs, ticks_of(draft, costs),
        fed(draft.graph, table, draft.minibatch),
    ), ends)


def _in_steps(draft: Draft, flow: Clocked, ends: Rows) -> Draft:
    """An asynchronous draft sorted by the step that runs each row and its place in the order of that step."""
    table, size = draft.table, len(draft.table)
    task = np.repeat(np.arange(size), np.diff(flow.start))
    lanes = [(own[1:], own[:-1]) for own in flow.lists]
    edges = to_csr(join([(task, flow.needs.astype(np.int64)), *lanes]), size)
    order = np.argsort(ends, kind="stable")
    step, level = steps(order, *edges, flow.fed)
    left = behind(draft, step, flow)
    if left:
        step, level = steps(order, *edges, moved(step, flow.lists, left, draft.minibatches))
    order = np.lexsort((table.device, level, step))
    return evolve(draft, table=table.take(order), step=step[order], behind=left)


def _check_independent(draft: Draft, task: Rows, need: Rows, leader: Rows) -> None:
    """Raise ScheduleError when a task of an overlap group needs another of the same group."""
    inside = np.flatnonzero((leader[task] == leader[need]) & (draft.table.group[task] > 0))
    if len(inside):
        first = draft.table.task(int(task[inside[0]])), draft.table.task(int(need[inside[0]]))
        raise ScheduleError(
            f"schedule {draft.schedule!r}: {first[0]} and {first[1]} overlap, but {first[0]} needs {first[1]}; "
            "only tasks that do not need each other can run as one"
        )


def _numbered(table: Table) -> Table:
    """The table with its overlap groups numbered 1, 2, ... in the order of the rows."""
    own = np.flatnonzero(table.group)
    if not len(own):
        return table
    _, first, which = np.unique(table.group[own], return_index=True, return_inverse=True)
    group = table.group.copy()
    group[own] = np.argsort(np.argsort(first))[which] + 1
    return evolve(table, group=group)


def deadlock(
    what: str, table: Table, lists: list[list[int]], reached: list[int], start: Column, needs: Column,
    ends: Column | np.ndarray[tuple[int], np.dtype[np.int64]], names: list[str] | None = None,
    chunk_of: dict[int, int] | None = None,
) -> str:
    """The story of a deadlock: where every queue stands and what it waits for.

    ``chunk_of``: the chunk of each stage, for tasks that were written in chunks of several stages.
    """
    def written(row: int) -> str:
        if chunk_of is None:
            return ""
        own = _members(table, row)
        text = "&".join(
            str(evolve(task, stage=chunk_of[task.stage])) for task in (table.task(int(i)) for i in own)
        )
        return f"chunk task {text}"

    lines = [f"{what} deadlocks:"]
    for number, (queue, at) in enumerate(zip(lists, reached, strict=True)):
        name = names[number] if names else f"device {number}"
        if at == len(queue):
            if names is None:
                lines.append(f"  {name} has ended")
            continue
        task = queue[at]
        missing = [int(n) for n in needs[start[task] : start[task + 1]] if not ends[n]]
        told = ", ".join(
            f"{_name(table, n)} ({', '.join(filter(None, [written(n), f'device {table.device[n]}']))})" for n in missing
        )
        told = told or "its turn on the other lane"
        here = f" ({written(task)})" if chunk_of else ""
        lines.append(f"  {name} stands at {_name(table, task)}{here}, which waits for {told}")
    return "\n".join(lines)


def _name(table: Table, row: int) -> str:
    """A task as it prints, with those of its overlap group: ``0F3&3B1``."""
    return "&".join(str(table.task(int(i))) for i in _members(table, row))


def _members(table: Table, row: int) -> Rows:
    """A task and those of its overlap group."""
    return np.flatnonzero(table.group == table.group[row]) if table.group[row] else np.asarray([row])
