"""Copies: a value goes straight from its producer to each reader's device, once, and one gradient comes back.

A COPY stands right after the task that makes what it carries; an order of copies that follows one global order
cannot deadlock, even when every send waits for its receiver.

A value that waits in host memory goes there once and from there to each device that reads it, after the task that
the copy back waits for: so what stands behind it on its lane is read only after that task too.
"""

from __future__ import annotations

import numpy as np
from attrs import evolve

from pipec.ir import FROM_HOST, TO_HOST, Kind, concat_tables, make_table
from pipec.passes.draft import Draft, index_of, least
from pipec.passes.hold import compute_order, gates


def copies(draft: Draft) -> Draft:
    """Insert COPY tasks for every value, gradient and recomputed value that leaves its device."""
    graph, index, devices, again = draft.graph, index_of(draft), draft.stage_devices, draft.again
    tables, after, rank = [draft.table], [np.arange(len(draft.table))], [np.full(len(draft.table), -1)]

    def insert(
        value: int, source: int, target: int, rows: np.ndarray, carries: int, later: np.ndarray | None = None
    ) -> None:
        there = rows >= 0
        made = draft.table.take(rows[there])
        size = len(made)
        tables.append(make_table(
            size, kind=Kind.COPY, stage=graph.values[value].producer, microbatch=made.microbatch,
            slice=made.slice, replica=made.replica, device=source, peer=target, value=value, gradient=carries,
        ))
        after.append(rows[there] if later is None else later[there])
        behind = max(carries + 1 - TO_HOST, 0) * len(graph.values) * draft.devices
        rank.append(np.full(size, behind + value * draft.devices + target))

    for value, info in enumerate(graph.values):
        home = int(devices[info.producer])
        forward, hosted = index.of(Kind.FORWARD, info.producer), info.through_host(devices)
        for target in sorted({int(devices[r]) for r in info.readers} - {home, *hosted}):
            insert(value, home, target, forward, 0)
        if hosted:
            insert(value, home, home, forward, TO_HOST)
        for target in hosted:
            first = least([index.of(Kind.FORWARD, r) for r in info.readers if devices[r] == target])
            gate = gates(draft.table, compute_order(draft.table, target), first)
            insert(value, home, target, forward, FROM_HOST, np.maximum(forward, gate))
        for target in sorted({int(devices[r]) for r in again.get(value, ())} - {home}):
            insert(value, home, target, index.of(Kind.RECOMPUTE, info.producer), 2)
        readers = graph.gradient_readers(value)
        for source in sorted({int(devices[r]) for r in readers} - {home}):
            own = [index.input_backward(r) for r in readers if devices[r] == source]
            insert(value, source, home, np.maximum.reduce(own), 1)
    order = np.lexsort((np.concatenate(rank), np.concatenate(after)))
    step = None if draft.step is None else draft.step[np.concatenate(after)][order]
    return evolve(draft, table=concat_tables(tables).take(order), step=step)
