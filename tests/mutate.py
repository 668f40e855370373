"""Ways to break a good plan, and what verify says about it."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from attrs import evolve

import pipec
from pipec.ir import BUFFER_COLUMNS, Buffers, Lane, Plan, Waits


def broken(plan: Plan, **options: Any) -> dict[str, list[str]]:
    """The problems that verify finds, by invariant."""
    try:
        plan.verify(**options)
    except pipec.PlanError as error:
        found: dict[str, list[str]] = {}
        name = ""
        for line in str(error).splitlines()[1:]:
            if match := re.fullmatch(r"  \d+\. (\w+): (.*)", line):
                name = match[1]
                found.setdefault(name, []).append(match[2])
            elif name:
                found[name][-1] += "\n" + line
        return found
    return {}


def row(plan: Plan, token: str) -> int:
    """The id of the task that prints as ``token``."""
    return next(i for i in range(len(plan)) if str(plan.table.task(i)) == token)


def set_column(plan: Plan, name: str, task: int, value: int) -> Plan:
    column = getattr(plan.table, name).copy()
    column[task] = value
    return evolve(plan, table=evolve(plan.table, **{name: column}))


def set_buffer(plan: Plan, name: str, buffer: int, value: int) -> Plan:
    column = getattr(plan.buffers, name).copy()
    column[buffer] = value
    return evolve(plan, buffers=evolve(plan.buffers, **{name: column}))


def buffer_of(plan: Plan, token: str, device: int) -> int:
    return next(
        i
        for i in range(len(plan.buffers))
        if plan.buffers.token(i) == token and plan.buffers.device[i] == device
    )


def take_buffers(plan: Plan, rows: Any) -> Plan:
    return evolve(plan, buffers=Buffers(*(getattr(plan.buffers, name)[rows] for name in BUFFER_COLUMNS)))


def waits_of(edges: list[tuple[int, int]], size: int) -> Waits:
    edges = sorted(set(edges))
    start = np.searchsorted([task for task, _ in edges], np.arange(size + 1))
    return Waits(start, [need for _, need in edges])


def edges_of(plan: Plan) -> list[tuple[int, int]]:
    return [(task, int(need)) for task in range(len(plan)) for need in plan.waits.of(task)]


def without_wait(plan: Plan, task: int, need: int) -> Plan:
    edges = [edge for edge in edges_of(plan) if edge != (task, need)]
    return evolve(plan, waits=waits_of(edges, len(plan)))


def drop(plan: Plan, task: int) -> Plan:
    """The plan without one task, the buffers it wrote or freed, and the waits on it."""
    keep = np.flatnonzero(np.arange(len(plan)) != task)
    new = np.cumsum(np.arange(len(plan)) != task) - 1
    lanes = tuple(tuple(new[ids[ids != task]].astype(np.int32) for ids in lanes) for lanes in plan.lanes)
    edges = [(int(new[a]), int(new[b])) for a, b in edges_of(plan) if task not in (a, b)]
    alive = np.flatnonzero((plan.buffers.writer != task) & (plan.buffers.free != task))
    plan = take_buffers(plan, alive)
    buffers = evolve(plan.buffers, writer=new[plan.buffers.writer], free=new[plan.buffers.free])
    return evolve(
        plan, table=plan.table.take(keep), lanes=lanes, waits=waits_of(edges, len(keep)), buffers=buffers
    )


def repeat(plan: Plan, task: int) -> Plan:
    """The plan with one task standing a second time, at the end of its lanes."""
    rows = np.append(np.arange(len(plan)), task)
    table, size = plan.table.take(rows), len(plan)
    lanes = tuple(
        tuple(np.append(ids, size).astype(np.int32) if task in ids else ids for ids in lanes)
        for lanes in plan.lanes
    )
    return evolve(plan, table=table, lanes=lanes, waits=waits_of(edges_of(plan), size + 1))


def swap(plan: Plan, device: int, lane: Lane, first: int, second: int) -> Plan:
    """The plan with two tasks of a lane in each other's place."""
    ids = plan.lanes[device][lane].copy()
    a, b = np.flatnonzero(ids == first)[0], np.flatnonzero(ids == second)[0]
    ids[[a, b]] = ids[[b, a]]
    lanes = list(plan.lanes[device])
    lanes[lane] = ids
    return evolve(plan, lanes=(*plan.lanes[:device], tuple(lanes), *plan.lanes[device + 1 :]))


def renumbered(plan: Plan, order: list[int]) -> Plan:
    """The same plan where task ``order[i]`` has the id ``i``."""
    new = np.empty(len(plan), np.int64)
    new[order] = np.arange(len(plan))
    return evolve(
        plan,
        table=plan.table.take(np.asarray(order)),
        lanes=tuple(tuple(new[ids].astype(np.int32) for ids in lanes) for lanes in plan.lanes),
        waits=waits_of([(int(new[a]), int(new[b])) for a, b in edges_of(plan)], len(plan)),
        buffers=evolve(plan.buffers, writer=new[plan.buffers.writer], free=new[plan.buffers.free]),
    )
