"""Lifetimes, lanes and waits: when each buffer is written and freed, and what must have ended before a task.

Every buffer has one free point, the last of its readers in the global order; where that task is on another lane
than an earlier reader, it waits for that reader. So no allocator needs to be told about other lanes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import field, frozen

from pipec.ir import (
    BACKWARDS,
    BUFFER_COLUMNS,
    CARRIED,
    FROM_HOST,
    TO_HOST,
    Buffer,
    Buffers,
    Kind,
    Lane,
    Lanes,
    Table,
    Waits,
    arrives,
    sends,
)
from pipec.passes.draft import Draft, Index, Pairs, grouped, index_of, join, least, pairs, to_csr
from pipec.passes.hold import gates
from pipec.passes.reduce import reduce_waits
from pipec.rules.base import READERS

Rows = npt.NDArray[np.int64]


@frozen(eq=False)
class Copies:
    """Rows of COPY tasks by (value, gradient, device, peer), each of shape (items,); -1 where there is none."""

    rows: dict[tuple[int, int, int, int], Rows]
    peers: dict[tuple[int, int, int], list[int]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        peers: dict[tuple[int, int, int], list[int]] = {}
        for value, gradient, device, peer in self.rows:
            peers.setdefault((value, gradient, device), []).append(peer)
        object.__setattr__(self, "peers", peers)

    @staticmethod
    def of(draft: Draft, items: int) -> Copies:
        table = draft.table
        ids = np.flatnonzero(table.kind == Kind.COPY)
        found: dict[tuple[int, int, int, int], Rows] = {}
        if not len(ids):
            return Copies(found)
        devices = draft.devices
        key = (table.value[ids].astype(np.int64) * CARRIED + table.gradient[ids]) * devices + table.device[ids]
        item = (table.replica[ids] * draft.slices + table.slice[ids]) * draft.microbatches + table.microbatch[ids]
        for route, own in grouped(key * devices + table.peer[ids]):
            rows = np.full(items, -1, np.int64)
            rows[item[own]] = ids[own]
            route, peer = divmod(route, devices)
            route, device = divmod(route, devices)
            found[route // CARRIED, route % CARRIED, device, peer] = rows
        return Copies(found)

    def sent(self, value: int, gradient: int, device: int) -> list[Rows]:
        return [self.rows[value, gradient, device, peer] for peer in self.peers.get((value, gradient, device), ())]


def lanes_of(table: Table, devices: int) -> tuple[Lanes, ...]:
    """Per device its compute, copy-out and copy-in lane: task ids in ascending order."""
    copy, out, into = table.kind == Kind.COPY, sends(table), arrives(table)
    made = []
    for device in range(devices):
        own = table.device == device
        made.append((
            np.flatnonzero(own & ~out & ~copy).astype(np.int32),
            np.flatnonzero(own & out).astype(np.int32),
            np.flatnonzero((table.peer == device) & into).astype(np.int32),
        ))
    return tuple(made)


def lifetimes(draft: Draft) -> tuple[tuple[Lanes, ...], Waits, Buffers]:
    """Lanes, waits and buffers of a linearised draft with all its tasks."""
    index = index_of(draft)
    sent = Copies.of(draft, index.items)
    buffers, holds = _buffers(draft, index, sent)
    lanes = lanes_of(draft.table, draft.devices)
    waits = join([*_data_waits(draft, index, sent, lanes), *_update_waits(draft), *reduce_waits(draft), *holds])
    start, ids = to_csr(waits, len(draft.table))
    return lanes, Waits(start, ids), buffers


def _most(rows: list[Rows]) -> Rows:
    return np.asarray(np.maximum.reduce(rows))


def _data_waits(draft: Draft, index: Index, sent: Copies, lanes: tuple[Lanes, ...]) -> list[Pairs]:
    """A copy waits for what it carries; the first reader on its device waits for the copy."""
    graph, devices, again = draft.graph, draft.stage_devices, draft.again
    parts = []
    for (value, gradient, source, target), rows in sent.rows.items():
        info = graph.values[value]
        if gradient == TO_HOST:
            parts.append(pairs(rows, index.of(Kind.FORWARD, info.producer)))
            continue
        if gradient == FROM_HOST:
            made = sent.rows[value, TO_HOST, source, source]
            first = least([index.of(Kind.FORWARD, r) for r in info.readers if devices[r] == target])
            parts.append(pairs(rows, gates(draft.table, lanes[target][Lane.COMPUTE], first)))
        elif gradient == 1:
            readers = [r for r in graph.gradient_readers(value) if devices[r] == source]
            made = _most([index.input_backward(r) for r in readers])
            first = index.input_backward(info.producer)
        else:
            kind, reading = (Kind.RECOMPUTE, again[value]) if gradient == 2 else (Kind.FORWARD, info.readers)
            made = index.of(kind, info.producer)
            first = least([index.of(kind, r) for r in reading if devices[r] == target])
        parts += [pairs(rows, made), pairs(first, rows)]
    return parts


def _update_waits(draft: Draft) -> list[Pairs]:
    """The first UPDATE of a device waits for the last backward of every other, unless updates come early."""
    table = draft.table
    backward = np.isin(table.kind, BACKWARDS)
    ids = np.flatnonzero(table.kind == Kind.UPDATE)
    if not len(ids) or draft.rule is not None:
        return []
    if draft.update_early:  # a stage's own REDUCE is on another lane
        index = index_of(draft)
        own = table.stage[ids]
        return [pairs(ids.astype(np.int64), index.rows[Kind.REDUCE, own, 0])]
    last = {d: np.flatnonzero(backward & (table.device == d)) for d in range(draft.devices)}
    reduced = np.flatnonzero(table.kind == Kind.REDUCE)
    parts = []
    for device in range(draft.devices):
        own = ids[table.device[ids] == device]
        for other in range(draft.devices):
            rows = reduced[table.device[reduced] == other]
            if len(own) and len(rows):
                parts.append((own[:1].astype(np.int64), rows[-1:]))
        for other, rows in last.items():
            if len(own) and other != device and len(rows):
                parts.append((own[:1].astype(np.int64), rows[-1:]))
    return parts


def _buffers(draft: Draft, index: Index, sent: Copies) -> tuple[Buffers, list[Pairs]]:
    graph, devices, again = draft.graph, draft.stage_devices, draft.again
    item = np.arange(index.items)
    identity = (item // (draft.microbatches * draft.slices), item % draft.microbatches,
                item // draft.microbatches % draft.slices)
    columns: list[list[Any]] = [[] for _ in BUFFER_COLUMNS]
    holds: list[Pairs] = []

    def add(kind: Buffer, ref: int, device: int, writer: Rows, free: Rows) -> None:
        there = (writer >= 0) & (free >= 0)
        replica, microbatch, slice_ = (part[there] for part in identity)
        size = len(replica)
        row = (np.full(size, kind), np.full(size, ref), replica, microbatch, slice_, np.full(size, device),
               writer[there], free[there])
        for column, part in zip(columns, row, strict=True):
            column.append(part)

    def last_use(reader: int, value: int) -> Rows:
        return index.of(Kind.FORWARD, reader) if reader in again.get(value, ()) else index.last_use(reader)

    for stage, about in enumerate(graph.stages):
        if about.backward:
            forward, anew = index.of(Kind.FORWARD, stage), index.of(Kind.RECOMPUTE, stage)
            add(Buffer.ACTIVATION, stage, int(devices[stage]), np.where(anew >= 0, anew, forward),
                index.last_backward(stage))
        if about.carry:
            home, backward = int(devices[stage]), index.input_backward(stage)
            add(Buffer.CARRY, stage, home, index.of(Kind.FORWARD, stage), index.of_next(index.last_use(stage)))
            add(Buffer.CARRY_GRADIENT, stage, home, index.of_next(backward), backward)
    for value, info in enumerate(graph.values):
        home = int(devices[info.producer])
        forward, backward = index.of(Kind.FORWARD, info.producer), index.input_backward(info.producer)
        hosted = info.through_host(devices)
        local = [r for r in info.readers if devices[r] == home and home not in hosted]
        copied = [*sent.sent(value, 0, home), *sent.sent(value, TO_HOST, home)]
        last_copy = _most(copied) if copied else np.full(index.items, -1)
        if local:
            last = _most([last_use(r, value) for r in local])
            add(Buffer.VALUE, value, home, forward, last)
            holds.append(pairs(last, last_copy))
        elif copied:
            add(Buffer.VALUE, value, home, forward, last_copy)
        for target in sorted({int(devices[r]) for r in info.readers} - {home, *hosted}):
            own = [r for r in info.readers if devices[r] == target]
            add(Buffer.VALUE, value, target, sent.rows[value, 0, home, target],
                _most([last_use(r, value) for r in own]))
        if hosted:
            back = [sent.rows[value, FROM_HOST, home, target] for target in hosted]
            add(Buffer.HOST, value, home, sent.rows[value, TO_HOST, home, home], _most(back))
            holds += [pairs(_most(back), np.where(rows < _most(back), rows, -1)) for rows in back]
            for target, rows in zip(hosted, back, strict=True):
                own = [r for r in info.readers if devices[r] == target]
                add(Buffer.FETCHED, value, target, rows, _most([last_use(r, value) for r in own]))
        if value in again:
            anew, copied = index.of(Kind.RECOMPUTE, info.producer), sent.sent(value, 2, home)
            uses: dict[int, list[Rows]] = {}
            for reader in again[value]:
                uses.setdefault(int(devices[reader]), []).append(index.input_backward(reader))
            if home in uses and copied:
                holds.append(pairs(_most(uses[home]), _most(copied)))
            add(Buffer.RECOMPUTED, value, home, anew, _most(uses.pop(home, copied)))
            for target, reading in uses.items():
                add(Buffer.RECOMPUTED, value, target, sent.rows[value, 2, home, target], _most(reading))
        readers = graph.gradient_readers(value)
        for source in sorted({int(devices[r]) for r in readers}):
            made = least([index.input_backward(r) for r in readers if devices[r] == source])
            if source == home:
                add(Buffer.GRADIENT, value, home, made, backward)
            elif (value, 1, source, home) in sent.rows:
                rows = sent.rows[value, 1, source, home]
                add(Buffer.GRADIENT, value, source, made, rows)
                add(Buffer.GRADIENT, value, home, rows, backward)
    for column, part in zip(columns, _stashed(draft), strict=True):
        column.append(part)
    empty = np.empty(0, np.int32)
    made_columns = [np.concatenate(column) if column else empty for column in columns]
    order = np.lexsort((made_columns[1], made_columns[0], made_columns[6]))
    return Buffers(*(column[order] for column in made_columns)), holds


def _stashed(draft: Draft) -> tuple[Rows, ...]:
    """Columns of the weight versions kept: from the UPDATE that replaces one to the last task that reads it after."""
    table = draft.table
    update = np.flatnonzero(table.kind == Kind.UPDATE)
    if draft.rule is None or not len(update):
        return tuple(np.empty(0, np.int64) for _ in BUFFER_COLUMNS)
    reading = np.flatnonzero(np.isin(table.kind, READERS))
    versions = int(table.version.max()) + 1
    last = np.full((len(draft.graph.stages), versions), -1, np.int64)
    np.maximum.at(last, (table.stage[reading], table.version[reading]), reading)
    free = last[table.stage[update], table.version[update]]
    kept = free > update
    update, free = update[kept], free[kept]
    made = table.take(update)
    return (np.full(len(update), int(Buffer.WEIGHT)), made.stage.astype(np.int64), made.replica.astype(np.int64),
            made.version.astype(np.int64), made.slice.astype(np.int64), made.device.astype(np.int64), update, free)
