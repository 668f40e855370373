"""Replicas of shared parameters on streams: their values on the way to them, their gradients on the way back.

The copy-out stream of the sender makes each copy, as it does those of the plan, beside what both devices compute. A
replica is written when everything of the step before that read it has ended, as the copy-in stream of its device waits
for that; the first task of each stage that reads it waits for the copy. A sum of gradients arrives in memory of the
compute stream's pool, since it may become the parameter's ``.grad``: the copy begins when that stream has come so far.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pipec.ir import Kind, Lane
from pipec.runtime.gradients import Accumulator
from pipec.runtime.lanes import Turn
from pipec.runtime.program import Op
from pipec.runtime.replicas import Replicas
from pipec.runtime.stream_api import Event, StreamApi
from pipec.runtime.transfer import fill, prepared

if TYPE_CHECKING:
    from pipec.runtime.stream_lanes import StreamLane

NOT_HERE: AbstractContextManager[Any] = nullcontext()


class ReplicaStreams:
    """The replicas during one part of a step."""

    def __init__(
        self, api: StreamApi, lanes: Sequence[StreamLane] | Mapping[int, StreamLane], replicas: Replicas
    ) -> None:
        """``lanes``: by 3 * device + lane."""
        self._api, self._lanes, self._replicas = api, lanes, replicas
        self._events: dict[int, list[Event]] = {}  # by stage, until its first task

    def send(self) -> None:
        """Queue the copies of the parameters' values to the replicas, once per step."""
        if not self._replicas.due:
            return
        self._replicas.due = False
        for (owner, user), own in self._replicas.routes().items():
            out, into = self._lanes[3 * owner + Lane.OUT], self._lanes[3 * user + Lane.IN]
            into.begin()
            out.begin()
            out.after([self._api.record(into.stream)])
            with self._api.on(into.stream, out.stream, what=f"parameters of {owner} for {user}"):
                fill([(one.tensor, one.parameter) for one in own])
            done = self._api.record(out.stream)
            into.after([done])
            for stage in self._replicas.readers(own):
                self._events.setdefault(stage, []).append(done)

    def arrived(self, stage: int) -> list[Event]:
        """What the first task of a stage has to wait for."""
        return self._events.pop(stage, [])

    def standing_in(self, op: Op) -> AbstractContextManager[Any]:
        """Around a task of a stage: its replicas stand in the modules. Optimizers see the user's parameters."""
        found = self._replicas.stand_ins.get(op.stage)
        return NOT_HERE if found is None or op.kind is Kind.UPDATE else found

    def reduce(self, turn: Turn, sums: Accumulator) -> tuple[Any, Any, Event]:
        """Carry a stage's sums to the devices of the parameters; from then on ``sums`` are of these. Its lane has
        waited for the sums already.

        Returns:
            Marks around the copies, and the event after them.
        """
        api, out = self._api, self._lanes[turn.lane]
        owed = list(self._replicas.owed(turn.op.stage, sums)) if turn.op.stage in self._replicas.stand_ins else []
        homes = sorted({self._replicas.homes[one.owner] for _, one, _ in owed})
        makers = [self._lanes[3 * home + Lane.COMPUTE] for home in homes]
        inward = [self._lanes[3 * home + Lane.IN] for home in homes]
        pairs: list[tuple[Tensor, Tensor]] = []
        made = []
        for lane in inward:
            lane.begin()
        if owed:
            with api.on(*(lane.stream for lane in makers), what=f"memory for {turn.name}"):
                for _, one, total in owed:
                    where = self._lanes[3 * self._replicas.homes[one.owner]].device
                    made.append(prepared(total, partial(torch.empty_like, device=where), pairs))
        out.after([api.record(lane.stream) for lane in makers])
        start = api.mark(out.stream)
        with api.on(*(lane.stream for lane in inward), out.stream, what=turn.name):
            fill(pairs)
        end, done = api.mark(out.stream), api.record(out.stream)
        for lane in inward:
            lane.after([done])
        if owed:
            self._lanes[3 * turn.op.device + Lane.COMPUTE].hold(
                f"{turn.name} sent", [total for _, _, total in owed], done)
        for (place, one, _), total in zip(owed, made, strict=True):
            sums.parameters[place] = one.parameter
            sums.give(place, total)
        return start, end, done
