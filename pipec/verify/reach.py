"""Does one task always end before another starts? Paths through the lanes and waits of a plan.

Nearly every question is settled by one vectorised look at the waits of the later task's lane; what is left is
settled exactly by vector clocks.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt

from pipec.ir import Plan
from pipec.passes.draft import to_csr
from pipec.topology import clock

Rows = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

ENTRIES = 1 << 24  # vector clock entries held at once


class Reach:
    """The order that lanes and waits impose on the tasks of a plan whose form is right.

    Attributes:
        lane, place: per task its lanes and its positions in them, shape (2, tasks). Lane 3d + k is lane k of
            device d. The second row is the copy-in lane of a COPY and -1 for every other task.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.size, self.count = plan, len(plan.table), 3 * plan.devices
        self.lane, self.place = np.full((2, self.size), -1, np.int64), np.zeros((2, self.size), np.int64)
        for device, lanes in enumerate(plan.lanes):
            for kind, ids in enumerate(lanes):
                row = int(kind == 2)
                self.lane[row, ids] = 3 * device + kind
                self.place[row, ids] = np.arange(len(ids))

    @cached_property
    def edges(self) -> tuple[Rows, Rows]:
        """Every wait as (task, the task it waits for)."""
        waits = self.plan.waits
        return np.repeat(np.arange(self.size), np.diff(waits.start)), waits.ids.astype(np.int64)

    @cached_property
    def united(self) -> tuple[Rows, Rows]:
        """As ``edges``, and the first task of every overlap group waits for what any of its group waits for.

        So nothing of a group runs before all of it can; tasks of a group follow each other on their lane.
        """
        task, need = self.edges
        group = self.plan.table.group
        if not group.any():
            return task, need
        more = np.flatnonzero(group[task])
        return np.concatenate([task, self.first[task[more]]]), np.concatenate([need, need[more]])

    @cached_property
    def first(self) -> Rows:
        """Per task the first of its overlap group on its lane, itself without one."""
        group = self.plan.table.group
        own = np.flatnonzero(group)
        own = own[np.lexsort((self.place[0, own], group[own]))]
        made = np.arange(self.size)
        _, start, which = np.unique(group[own], return_index=True, return_inverse=True)
        made[own] = own[start[which]] if len(own) else own
        return made

    @cached_property
    def canonical(self) -> bool:
        """Ids are an execution order: each wait has a smaller id than its task, and each lane ascends."""
        task, need = self.united
        return bool((need < task).all()) and all(
            bool((ids[1:] > ids[:-1]).all()) for lanes in self.plan.lanes for ids in lanes
        )

    @cached_property
    def order(self) -> Rows | None:
        """A topological order of lanes and waits, None where there is none."""
        if self.canonical:
            return np.arange(self.size)
        ends, _ = self.run(*to_csr(self.united, self.size))
        return np.argsort(ends, kind="stable") if ends.all() else None

    def run(self, start: npt.NDArray[np.int32], needs: npt.NDArray[np.int32]) -> tuple[Rows, list[int]]:
        """End times and the place each lane reached when every task takes one tick, under the given waits."""
        lists = [ids.tolist() for lanes in self.plan.lanes for ids in lanes]
        return clock(lists, start, needs, [1] * self.size)

    def proved(self, before: Rows, after: Rows) -> Flags:
        """Per pair whether ``before`` has ended whenever ``after`` starts, shape (pairs,)."""
        found = self._same_lane(before, after)
        for settle in (self._by_wait, self._by_clock):
            open_ = np.flatnonzero(~found)
            if len(open_):
                found[open_] = settle(before[open_], after[open_])
        return found

    def _same_lane(self, before: Rows, after: Rows) -> Flags:
        lane, place = self.lane, self.place
        own = lane[:, before]
        found = (own >= 0) & (own == lane[:, after]) & (place[:, before] < place[:, after])
        return np.asarray(found.any(axis=0))

    @cached_property
    def _cover(self) -> tuple[Rows, Rows]:
        """Per pair of lanes, along the waiting one, the furthest place on the other that is waited for.

        Both arrays hold (waiting lane, other lane) * (tasks + 1) + a place: of the task that waits, ascending;
        and of the furthest task waited for up to there.
        """
        task, need = self.edges
        keys, values = [], []
        for mine in range(2):
            for other in range(2):
                there = (self.lane[mine, task] >= 0) & (self.lane[other, need] >= 0)
                t, n = task[there], need[there]
                group = (self.lane[mine, t] * self.count + self.lane[other, n]) * (self.size + 1)
                keys.append(group + self.place[mine, t])
                values.append(group + self.place[other, n])
        key, value = np.concatenate(keys), np.concatenate(values)
        order = np.argsort(key, kind="stable")
        return key[order], np.maximum.accumulate(value[order]) if len(order) else value

    def _by_wait(self, before: Rows, after: Rows) -> Flags:
        """A wait on ``before`` or a later task of its lane, by ``after`` or an earlier task of its lane."""
        keys, furthest = self._cover
        found = np.zeros(len(before), bool)
        if not len(keys):
            return found
        for mine in range(2):
            for other in range(2):
                there = (self.lane[mine, after] >= 0) & (self.lane[other, before] >= 0)
                group = (self.lane[mine, after] * self.count + self.lane[other, before]) * (self.size + 1)
                at = np.searchsorted(keys, group + self.place[mine, after], side="right") - 1
                # an entry of an earlier pair of lanes is smaller than `group`, so it never passes this test
                found |= there & (at >= 0) & (furthest[at] >= group + self.place[other, before])
        return found

    def _by_clock(self, before: Rows, after: Rows) -> Flags:
        """Exact: per task and lane, the furthest place that has ended when the task starts."""
        found = np.zeros(len(before), bool)
        order = self.order
        if order is None:
            return found
        row = np.where(self.lane[0, before] >= 0, 0, 1)
        lanes = np.unique(self.lane[row, before])
        width = max(1, ENTRIES // max(1, self.size))
        for first in range(0, len(lanes), width):
            chosen = lanes[first : first + width]
            column = np.searchsorted(chosen, self.lane[row, before])
            own = np.isin(self.lane[row, before], chosen)
            clocks = self._clocks(order, chosen)
            found[own] = clocks[after[own], column[own]] >= self.place[row, before][own]
        return found

    def _clocks(self, order: Rows, lanes: Rows) -> npt.NDArray[np.int32]:
        clocks = np.full((self.size, len(lanes)), -1, np.int32)
        column = np.full(self.count, -1)
        column[lanes] = np.arange(len(lanes))
        previous: list[list[int]] = [[] for _ in range(self.size)]
        for ids in (ids for device in self.plan.lanes for ids in device):
            for earlier, later in zip(ids[:-1].tolist(), ids[1:].tolist(), strict=True):
                previous[later].append(earlier)
        for task in order.tolist():
            own = clocks[task]
            for need in (*previous[task], *self.plan.waits.of(task).tolist()):
                np.maximum(own, clocks[need], out=own)
                for row in range(2):
                    at = column[self.lane[row, need]] if self.lane[row, need] >= 0 else -1
                    if at >= 0:
                        own[at] = max(own[at], self.place[row, need])
        return clocks
