"""The value that passes hand on: tasks so far, in order, and where to find each of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import frozen

from pipec.ir import BACKWARDS, Chunk, Column, Kind, Plan, Table
from pipec.rules.base import Rule
from pipec.segments import Again, recomputed_values
from pipec.spec import Graph

Pairs = tuple[npt.NDArray[Any], npt.NDArray[Any]]  # (task, task it needs), row by row
NO_PAIRS: Pairs = (np.empty(0, np.int64), np.empty(0, np.int64))


@frozen(eq=False)
class Draft:
    """A plan being built. Rows of ``table`` are in device order first, in one global order after linearise."""

    graph: Graph
    chunks: tuple[Chunk, ...]
    devices: int
    microbatches: int
    schedule: str
    table: Table
    recompute: str = "never"
    update: str | None = None
    update_early: bool = False
    replicas: int = 1
    slices: int = 1
    minibatches: int = 1
    rule: Rule | None = None  # of an asynchronous draft
    step: npt.NDArray[np.int64] | None = None  # per row of an asynchronous draft the step that runs it
    behind: tuple[int, ...] = ()  # the same: per device the tasks that a step leaves to the next

    @property
    def again(self) -> Again:
        """The values that segments recompute, with their readers."""
        return recomputed_values(self.graph, self.recompute)

    @property
    def minibatch(self) -> int:
        """Microbatches per minibatch."""
        return self.microbatches // self.minibatches

    @property
    def stage_devices(self) -> npt.NDArray[np.int32]:
        devices = np.full(len(self.graph.stages), -1, np.int32)
        for chunk in self.chunks:
            devices[list(chunk.stages)] = chunk.device
        return devices

    def __str__(self) -> str:
        """The compute tasks of every device in the order of the rows."""
        rows = []
        for device in range(self.devices):
            ids = np.flatnonzero((self.table.device == device) & (self.table.kind != Kind.COPY))
            rows.append(f"device {device}: " + " ".join(str(self.table.task(int(i))) for i in ids))
        return "\n".join(rows)


class Index:
    """Row numbers by kind, stage and item (microbatch, slice and replica as one number); -1 where there is none."""

    def __init__(self, table: Table, stages: int, microbatches: int, slices: int = 1, replicas: int = 1) -> None:
        self.items = microbatches * slices * replicas
        self._shape = replicas, slices, microbatches
        self.rows = np.full((len(Kind), stages, self.items), -1, np.int64)
        ids = np.flatnonzero((table.kind != Kind.COPY) & (table.kind != Kind.UPDATE))
        item = (table.replica[ids] * slices + table.slice[ids]) * microbatches + table.microbatch[ids]
        self.rows[table.kind[ids], table.stage[ids], item] = ids

    def of(self, kind: Kind, stage: int) -> npt.NDArray[np.int64]:
        """Rows of ``kind`` of a stage by item, shape (items,)."""
        rows: npt.NDArray[np.int64] = self.rows[kind, stage]
        return rows

    def of_next(self, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Per item the row of its microbatch's next slice, -1 for the last slice; ``rows`` are by item."""
        moved = np.full(self._shape, -1, np.int64)
        moved[:, :-1] = rows.reshape(self._shape)[:, 1:]
        return moved.ravel()

    def input_backward(self, stage: int) -> npt.NDArray[np.int64]:
        """The tasks that make a stage's input gradients: BACKWARD or BACKWARD_INPUT."""
        whole = self.of(Kind.BACKWARD, stage)
        return np.where(whole >= 0, whole, self.of(Kind.BACKWARD_INPUT, stage))

    def last_backward(self, stage: int) -> npt.NDArray[np.int64]:
        """The last task of each backward: BACKWARD, or the later half of a split one."""
        return np.asarray(np.maximum.reduce([self.of(kind, stage) for kind in BACKWARDS]))

    def last_use(self, stage: int) -> npt.NDArray[np.int64]:
        """When a stage no longer needs what it read: after its input gradients, or its forward without any."""
        backward = self.input_backward(stage)
        return np.where(backward >= 0, backward, self.of(Kind.FORWARD, stage))


def index_of(draft: Draft | Plan) -> Index:
    return Index(draft.table, len(draft.graph.stages), draft.microbatches, draft.slices, draft.replicas)


def leaders(table: Table) -> npt.NDArray[np.int64]:
    """Per row the first row of its overlap group, itself without one."""
    rows = np.arange(len(table))
    own = np.flatnonzero(table.group)
    if len(own):
        _, first, which = np.unique(table.group[own], return_index=True, return_inverse=True)
        rows[own] = own[first[which]]
    return rows


def last_of_groups(table: Table) -> npt.NDArray[np.int64]:
    """Per row the last row of its overlap group, itself without one."""
    return len(table) - 1 - leaders(table.take(np.arange(len(table))[::-1]))[::-1]


def pairs(task: npt.NDArray[Any], needs: npt.NDArray[Any]) -> Pairs:
    """The pairs of both columns where both tasks exist."""
    there = (task >= 0) & (needs >= 0)
    return task[there], needs[there]


def least(rows: list[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    """Per item the smallest row that exists, -1 without any."""
    stacked = np.stack(rows)
    found = np.where(stacked >= 0, stacked, np.iinfo(np.int64).max).min(axis=0)
    return np.where(found == np.iinfo(np.int64).max, -1, found)


def join(parts: list[Pairs]) -> Pairs:
    if not parts:
        return NO_PAIRS
    return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])


def to_csr(given: Pairs, size: int) -> tuple[Column, Column]:
    """Pairs grouped by task, sorted, without duplicates: ``needs[start[i]:start[i + 1]]``."""
    task, needs = given
    if len(task):
        key = np.sort(task.astype(np.int64) * size + needs)
        key = key[np.append(True, key[1:] != key[:-1])]
        task, needs = key // size, key % size
    start = np.zeros(size + 1, np.int32)
    np.cumsum(np.bincount(task, minlength=size), out=start[1:])
    return start, needs.astype(np.int32)


def grouped(key: npt.NDArray[np.int64]) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
    """Every different key, none negative, ascending, with the positions that hold it."""
    order = np.argsort(key, kind="stable")
    bounds = np.flatnonzero(np.diff(key[order], prepend=-1, append=-1)) if len(key) else np.zeros(1, np.int64)
    for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        yield int(key[order[first]]), order[first:last]


def data_edges(graph: Graph, index: Index, again: Again) -> Pairs:
    """What each compute task needs of others: inputs for a forward or a segment's recompute, gradients for a
    backward."""
    parts = []
    for number, stage in enumerate(graph.stages):
        forward, recompute = index.of(Kind.FORWARD, number), index.of(Kind.RECOMPUTE, number)
        backward, weight = index.input_backward(number), index.of(Kind.BACKWARD_WEIGHT, number)
        for producer in {graph.values[v].producer for v in stage.reads}:
            parts.append(pairs(forward, index.of(Kind.FORWARD, producer)))
        parts.append(pairs(recompute, forward))
        for producer in {graph.values[v].producer for v in stage.reads if number in again.get(v, ())}:
            parts.append(pairs(recompute, index.of(Kind.RECOMPUTE, producer)))
        parts.append(pairs(backward, np.where(recompute >= 0, recompute, forward)))
        parts.append(pairs(weight, backward))
        for reader in {r for v in stage.gives for r in graph.gradient_readers(v)}:
            parts.append(pairs(backward, index.input_backward(reader)))
        if stage.carry:
            parts += [pairs(index.of_next(forward), forward), pairs(backward, index.of_next(backward))]
    return join(parts)
