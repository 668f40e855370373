"""Copies: a value goes straight from its producer to each reader's device, once, and one gradient comes back.

A COPY stands right after the task that makes what it carries; an order of copies that follows one global order
cannot deadlock, even when every send waits for its receiver.
"""

from __future__ import annotations

import numpy as np
from attrs import evolve

from pipec.ir import Kind, concat_tables, make_table
from pipec.passes.draft import Draft, index_of


def copies(draft: Draft) -> Draft:
    """Insert COPY tasks for every value, gradient and recomputed value that leaves its device."""
    graph, index, devices, again = draft.graph, index_of(draft), draft.stage_devices, draft.again
    tables, after, rank = [draft.table], [np.arange(len(draft.table))], [np.full(len(draft.table), -1)]

    def insert(value: int, source: int, target: int, rows: np.ndarray, carries: int) -> None:
        there = rows >= 0
        made = draft.table.take(rows[there])
        size = len(made)
        tables.append(make_table(
            size, kind=Kind.COPY, stage=graph.values[value].producer, microbatch=made.microbatch,
            slice=made.slice, replica=made.replica, device=source, peer=target, value=value, gradient=carries,
        ))
        after.append(rows[there])
        rank.append(np.full(size, value * draft.devices + target))

    for value, info in enumerate(graph.values):
        home = int(devices[info.producer])
        for target in sorted({int(devices[r]) for r in info.readers} - {home}):
            insert(value, home, target, index.of(Kind.FORWARD, info.producer), 0)
        for target in sorted({int(devices[r]) for r in again.get(value, ())} - {home}):
            insert(value, home, target, index.of(Kind.RECOMPUTE, info.producer), 2)
        readers = graph.gradient_readers(value)
        for source in sorted({int(devices[r]) for r in readers} - {home}):
            own = [index.input_backward(r) for r in readers if devices[r] == source]
            insert(value, source, home, np.maximum.reduce(own), 1)
    order = np.lexsort((np.concatenate(rank), np.concatenate(after)))
    return evolve(draft, table=concat_tables(tables).take(order))
