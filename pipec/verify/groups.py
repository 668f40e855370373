"""Invariant about overlap groups: tasks that run as one stand side by side and do not need each other."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipec.ir import Kind
from pipec.passes.draft import grouped
from pipec.verify.facts import Facts, Rows, some


def groups(facts: Facts) -> list[str]:
    """A group has at least two forwards or backwards, side by side on one device's compute lane, and none of them
    needs another. What needs would lead from one to another through other tasks is a deadlock, since a group starts
    when all its tasks can: ``progress`` finds that."""
    table, reach = facts.table, facts.reach
    own = np.flatnonzero(table.group)
    if not len(own):
        return []
    wrong = own[np.isin(table.kind[own], (Kind.COPY, Kind.UPDATE, Kind.REDUCE))]
    found = some(wrong, (
        f"{facts.task(i)} is in group {table.group[i]}, but only forwards and backwards overlap" for i in wrong.tolist()
    ))
    apart = []
    for number, rows in grouped(table.group[own].astype(np.int64)):
        apart += list(_apart(facts, number, own[rows]))
    found += some(np.empty(len(apart)), iter(apart))
    for need in (*facts.own_needs, *facts.data_needs):
        same = np.flatnonzero((reach.first[need.before] == reach.first[need.after]) & (table.group[need.after] > 0))
        found += some(same, (
            f"{facts.task(int(need.after[i]))} is in group {table.group[need.after[i]]} with "
            f"{facts.task(int(need.before[i]))}, which it needs" for i in same.tolist()
        ))
    return found


def _apart(facts: Facts, number: int, rows: Rows) -> Iterator[str]:
    if len(rows) == 1:
        yield f"{facts.task(int(rows[0]))} is alone in group {number}; a group has at least two tasks"
        return
    lanes, places = facts.reach.lane[0, rows], np.sort(facts.reach.place[0, rows])
    if len(np.unique(lanes)) > 1 or (np.diff(places) != 1).any():
        told = ", ".join(facts.task(int(i)) for i in rows[:4])
        yield f"group {number} is torn apart: its tasks ({told}) do not stand side by side on one device"
