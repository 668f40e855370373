"""Linearise: one global order that keeps every device's own and runs everything a task needs before it.

Task ids are positions in this order, so later passes and every reader of the plan need no search.
"""

from __future__ import annotations

import numpy as np
from attrs import evolve

from pipec.errors import PlanError
from pipec.ir import Column, Kind, Table
from pipec.passes.draft import Draft, data_edges, index_of, to_csr
from pipec.topology import clock

TICKS = {Kind.BACKWARD: 2}  # all others: 1


def linearise(draft: Draft) -> Draft:
    """Sort the rows by when they end if a whole backward takes two ticks and everything else one.

    Raises:
        PlanError: on a deadlock, with the task at which every device stands and what it waits for.
    """
    table = draft.table
    start, needs = to_csr(data_edges(draft.graph, index_of(draft)), len(table))
    lists = [np.flatnonzero(table.device == d).tolist() for d in range(draft.devices)]
    ticks = np.where(table.kind == Kind.BACKWARD, 2, 1).tolist()
    ends, reached = clock(lists, start, needs, ticks)
    if len(table) and not ends.all():
        raise PlanError(deadlock(f"schedule {draft.schedule!r}", table, lists, reached, start, needs, ends))
    return evolve(draft, table=table.take(np.lexsort((table.device, ends))))


def deadlock(
    what: str, table: Table, lists: list[list[int]], reached: list[int], start: Column, needs: Column,
    ends: Column | np.ndarray[tuple[int], np.dtype[np.int64]], names: list[str] | None = None,
) -> str:
    """The story of a deadlock: where every queue stands and what it waits for."""
    lines = [f"{what} deadlocks:"]
    for number, (queue, at) in enumerate(zip(lists, reached, strict=True)):
        name = names[number] if names else f"device {number}"
        if at == len(queue):
            if names is None:
                lines.append(f"  {name} has ended")
            continue
        task = queue[at]
        missing = [int(n) for n in needs[start[task] : start[task + 1]] if not ends[n]]
        told = ", ".join(f"{table.task(n)} (device {table.device[n]})" for n in missing) or "its turn on the other lane"
        lines.append(f"  {name} stands at {table.task(task)}, which waits for {told}")
    return "\n".join(lines)
