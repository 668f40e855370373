"""Behind: how many tasks of a step each device of an asynchronous plan leaves to the next one.

All devices end a step together, and the next step's minibatch is there only then. If a step ended with all that its
minibatch allows, the first devices would wait for the last ones at its end, and the last ones for the first at the
next one's begin: a fill of the pipeline in every step. Cut at one moment of the undisturbed flow instead, when every
device is about as busy as at any other, the devices begin and end a step nearly at once.

Undisturbed, devices that none of the others waits for would run ahead of them, or fall behind, more with every
minibatch. Where there are such devices the flow is fed at the pace of the slowest one, as steps feed it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from attrs import frozen

from pipec.costs import Costs
from pipec.ir import BACKWARDS, Column, Kind
from pipec.passes.draft import Draft, join, to_csr
from pipec.topology import clock

Rows = npt.NDArray[np.int64]

MOMENTS = 64  # at which a step might be cut that are looked at; with 16, 107 devices lose three ticks more of 24
FINE = 1_000_000  # ticks of the longest task


@frozen(eq=False)
class Clocked:
    """An asynchronous draft as a clock runs it.

    Attributes:
        lists: per device its tasks in order.
        start, needs: per task what it needs of others, as in :class:`pipec.ir.Waits`.
        ticks: per task how long it takes.
        fed: per task the minibatch that it reads from outside.
    """

    lists: list[Rows]
    start: Column
    needs: Column
    ticks: Rows
    fed: Rows


def ticks_of(draft: Draft, costs: Costs | None) -> Rows:
    """How long each task takes under ``costs``; without any, all devices are as busy as one another."""
    table = draft.table
    if costs is None:
        each = np.bincount([chunk.device for chunk in draft.chunks for _ in chunk.stages], minlength=draft.devices)
        made = np.where(table.kind == Kind.BACKWARD, 2.0, 1.0) / each[table.device]
        made[table.kind == Kind.UPDATE] = 0.0
    else:
        kinds = (Kind.FORWARD, Kind.RECOMPUTE, *BACKWARDS, Kind.UPDATE)
        by_stage = np.zeros((len(Kind), len(draft.graph.stages)))
        for number, stage in enumerate(draft.graph.stages):
            by_stage[list(kinds), number] = [costs.duration(kind, stage.name) for kind in kinds]
        made = by_stage[table.kind, table.stage]
    longest = float(made.max(initial=0.0)) or 1.0
    return np.maximum(1, np.rint(made * (FINE / longest))).astype(np.int64)


def behind(draft: Draft, step: Rows, flow: Clocked) -> tuple[int, ...]:
    """Per device how many tasks it is behind at the end of a step; as few as make a step as short as possible. Empty
    when that is none.

    Args:
        step: per row the step that runs it when no device is.
    """
    steady = draft.minibatches - 2  # the last step has no successor whose absence would show
    best = np.zeros(draft.devices, np.int64)
    if steady < 1:
        return ()
    edges, updates = _edges(flow), draft.table.kind == Kind.UPDATE
    ends, _ = clock([own.tolist() for own in flow.lists], flow.start, flow.needs, flow.ticks.tolist())
    if not _coupled(edges, draft.devices):
        ends = _paced(flow, _pace(ends, step, flow, steady), draft.minibatches)
    first, last = np.transpose([np.searchsorted(step[own], (steady, steady + 1)) for own in flow.lists])
    before, after = (int((ends - flow.ticks)[flow.fed == k].min()) for k in (steady, steady + 1))
    # a moment one microbatch earlier cuts the same flow in the same way
    moments = np.unique(ends[(step == steady) & (ends > after - (after - before) // draft.minibatch)])
    length = _length(flow, first, last)
    for moment in moments[:: -max(1, len(moments) // MOMENTS)].tolist():
        left = last - _closed(_reached(ends, moment, flow, last, updates), edges)
        if (own := _length(flow, np.maximum(first - left, 0), last - left)) < length:
            length, best = own, left
    return tuple(best.tolist()) if best.any() else ()


def _coupled(edges: tuple[Rows, Rows, Rows, Rows], devices: int) -> bool:
    """Whether every device waits for every other, if only by way of third ones."""
    waits = np.eye(devices, dtype=np.float32)
    waits[edges[0], edges[2]] = 1.0
    for _ in range(devices.bit_length()):
        waits = np.minimum(waits @ waits, 1.0)
    return bool(waits.all())


def _pace(ends: Rows, step: Rows, flow: Clocked, steady: int) -> int:
    """The time from one minibatch to the next on the device where it is longest, over the later half of the steps."""
    half = steady // 2
    longest = 0
    for own in flow.lists:
        begin, end = np.searchsorted(step[own], (half, steady), side="right")
        if 0 < begin < end:
            longest = max(longest, int(ends[own[end - 1]] - ends[own[begin - 1]]))
    return -(-longest // (steady - half))


def _paced(flow: Clocked, pace: int, minibatches: int) -> Rows:
    """When the tasks end if minibatch k is there at k times ``pace``."""
    size = len(flow.ticks)
    fed = np.flatnonzero(flow.fed)
    task = np.repeat(np.arange(size), np.diff(flow.start))
    feeds = size + np.arange(minibatches - 1)  # tasks that a device of their own runs: the k-th ends when k + 1 comes
    needs = to_csr(join([(task, flow.needs.astype(np.int64)), (fed, size - 1 + flow.fed[fed])]), size + len(feeds))
    ticks = np.concatenate([flow.ticks, np.full(len(feeds), max(1, pace))])
    ends, _ = clock([*(own.tolist() for own in flow.lists), feeds.tolist()], *needs, ticks.tolist())
    return ends[:size]


def _reached(ends: Rows, moment: int, flow: Clocked, last: Rows, updates: npt.NDArray[np.bool_]) -> Rows:
    """How many tasks of every list have ended at a moment, the updates that follow them at once included."""
    made = np.asarray([np.searchsorted(ends[own[:end]], moment, side="right")
                       for own, end in zip(flow.lists, last.tolist(), strict=True)], np.int64)
    for device, own in enumerate(flow.lists):
        while made[device] < last[device] and updates[own[made[device]]]:
            made[device] += 1
    return made


def _edges(flow: Clocked) -> tuple[Rows, Rows, Rows, Rows]:
    """What tasks need of other devices: list and place of each task, list and place of what it needs."""
    number, place = np.zeros((2, len(flow.ticks)), np.int64)
    for device, own in enumerate(flow.lists):
        number[own], place[own] = device, np.arange(len(own))
    task = np.repeat(np.arange(len(place)), np.diff(flow.start))
    return number[task], place[task], number[flow.needs], place[flow.needs]


def _closed(reached: Rows, edges: tuple[Rows, Rows, Rows, Rows]) -> Rows:
    """How far each list comes when it goes no further than ``reached`` and no task before what it needs."""
    own, place, other, needed = edges
    while True:
        early = (place < reached[own]) & (needed >= reached[other])
        if not early.any():
            return reached
        reached = reached.copy()
        np.minimum.at(reached, own[early], place[early])


def _length(flow: Clocked, first: Rows, last: Rows) -> int:
    """How long the tasks between two places of every list take when all begin at once."""
    lists = [own[begin:end] for own, begin, end in zip(flow.lists, first.tolist(), last.tolist(), strict=True)]
    rows = np.concatenate(lists)
    place = np.full(len(flow.ticks), -1, np.int64)
    place[rows] = np.arange(len(rows))
    task = np.repeat(np.arange(len(place)), np.diff(flow.start))
    inside = (place[task] >= 0) & (place[flow.needs] >= 0)
    needs = to_csr((place[task[inside]], place[flow.needs[inside]]), len(rows))
    ends, _ = clock([place[own].tolist() for own in lists], *needs, flow.ticks[rows].tolist())
    return int(ends.max(initial=0))
