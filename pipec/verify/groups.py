"""Invariant about overlap groups: tasks that run as one stand side by side and do not need each other."""

from __future__ import annotations

import numpy as np

from pipec.ir import Kind
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
    torn = _torn(facts, own)
    found += some(np.empty(len(torn)), (_apart(facts, number, own[table.group[own] == number]) for number in torn))
    for need in (*facts.own_needs, *facts.data_needs):
        same = np.flatnonzero((reach.first[need.before] == reach.first[need.after]) & (table.group[need.after] > 0))
        found += some(same, (
            f"{facts.task(int(need.after[i]))} is in group {table.group[need.after[i]]} with "
            f"{facts.task(int(need.before[i]))}, which it needs" for i in same.tolist()
        ))
    return found


def _torn(facts: Facts, own: Rows) -> list[int]:
    """The groups of the tasks ``own`` that are of one task only, or not side by side on one lane."""
    lanes, places, group = facts.reach.lane[0, own], facts.reach.place[0, own], facts.table.group[own]
    order = np.lexsort((places, lanes, group))
    lanes, places, group = lanes[order], places[order], group[order]
    same = group[1:] == group[:-1]
    follows = (lanes[1:] == lanes[:-1]) & (places[1:] == places[:-1] + 1)
    alone = ~np.append(same, False) & ~np.append(False, same)
    return sorted({*group[1:][same & ~follows].tolist(), *group[alone].tolist()})


def _apart(facts: Facts, number: int, rows: Rows) -> str:
    if len(rows) == 1:
        return f"{facts.task(int(rows[0]))} is alone in group {number}; a group has at least two tasks"
    told = ", ".join(facts.task(int(i)) for i in rows[:4])
    return f"group {number} is torn apart: its tasks ({told}) do not stand side by side on one device"
