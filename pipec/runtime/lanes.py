"""Lanes at run time: in-order queues, and the order in which a plan's tasks are submitted to them.

A backend with lanes hands over every task with the events it has to wait for: work on one lane runs in the order in
which it was submitted, work on different lanes in any order that the events allow. Nothing else keeps tasks apart, so
what the plan does not wait for may happen at any time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from attrs import frozen

from pipec.errors import RaceError
from pipec.ir import FROM_HOST, TO_HOST, Kind, Lane, Plan
from pipec.runtime.channels import Channels
from pipec.runtime.program import Op, Route
from pipec.runtime.transfer import copied, duplicate

Work = Callable[[], None]
Event = Any  # whatever a lane says has happened when a piece of work has ended


class WorkLane(Protocol):
    """An in-order queue."""

    def submit(self, work: Work | None, after: Sequence[Event]) -> Event:
        """Run ``work`` after all that was submitted before and after the events; None only waits for them.

        Returns:
            The event that it has ended.
        """


@frozen(eq=False)
class Turn:
    """One task as it is submitted.

    Attributes:
        lane: 3 * device + lane; of a COPY the copy-out lane of its source, or where it comes from host memory the
            copy-in lane of its target.
        into: the copy-in lane of the target of a COPY from device to device, else -1.
        waits: the tasks it waits for.
        awaited: whether a task waits for it.
        name: as it prints.
    """

    op: Op
    lane: int
    into: int
    waits: tuple[int, ...]
    awaited: bool
    name: str


def lane_name(lane: int) -> str:
    """``compute lane of device 1``."""
    return f"{('compute', 'copy-out', 'copy-in')[lane % 3]} lane of device {lane // 3}"


def turns(plan: Plan, ops: Sequence[Sequence[Op]]) -> list[Turn]:
    """Every task of ``ops`` in the plan's one order, in which each comes after what it waits for."""
    made, awaited = [], set(plan.waits.ids.tolist())
    for op in sorted((op for row in ops for op in row), key=lambda op: op.task):
        copy, carries = op.kind is Kind.COPY, int(plan.table.gradient[op.task])
        lane = 3 * op.device + (Lane.OUT if copy or op.kind is Kind.REDUCE else Lane.COMPUTE)
        into = 3 * op.route[1] + Lane.IN if copy and carries != TO_HOST else -1
        if carries == FROM_HOST:
            lane, into = into, -1
        made.append(Turn(op, lane, into, tuple(plan.waits.of(op.task).tolist()), op.task in awaited,
                         str(plan.table.task(op.task))))
    return made


def submit_all(all_turns: Sequence[Turn], lanes: Sequence[WorkLane], work: Callable[[Op], Work]) -> list[Event]:
    """Submit every turn; returns the events of all.

    A COPY is at the head of two lanes at once: the copy-in lane says that it has come so far, the copy-out lane waits
    for that and copies, and the copy-in lane goes on when it is done.
    """
    events: dict[int, Event] = {}
    for turn in all_turns:
        after = [events[task] for task in turn.waits if task in events]  # others ended in an earlier part of the step
        if turn.into < 0:
            event = lanes[turn.lane].submit(work(turn.op), after)
        else:
            ready = lanes[turn.into].submit(None, ())
            copied_ = lanes[turn.lane].submit(work(turn.op), (*after, ready))
            event = lanes[turn.into].submit(None, (copied_,))
        events[turn.op.task] = event
    return list(events.values())


class Turns:
    """The turns of each program, worked out once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, list[Turn]]] = {}

    def of(self, plan: Plan, ops: Sequence[Sequence[Op]]) -> list[Turn]:
        if id(ops) not in self._known:
            self._known[id(ops)] = ops, turns(plan, ops)
        return self._known[id(ops)][1]


class CopyingChannels(Channels):
    """Channels whose receivers own what arrives. Nothing waits here: a task that comes too early is a race."""

    def __init__(self, routes: tuple[Route, ...]) -> None:
        super().__init__(routes)
        self._arrived: dict[Route, deque[tuple[int, Any]]] = {route: deque() for route in routes}

    def send(self, route: Route, slot: int, payload: Any) -> None:
        self._arrived[route].append((slot, copied(payload, duplicate)))

    def to_host(self, payload: Any) -> Any:
        return copied(payload, duplicate)

    def shift(self, by: int) -> None:
        for route, arrived in self._arrived.items():
            self._arrived[route] = deque((slot - by, payload) for slot, payload in arrived)

    def receive(self, route: Route) -> tuple[int, Any]:
        """What has arrived next on ``route``.

        Raises:
            RaceError: nothing has, so the receiver did not wait for the copy.
        """
        try:
            return self._arrived[route].popleft()
        except IndexError:
            raise RaceError(
                f"a task of device {route[1]} reads what device {route[0]} sends before the copy has ended; the plan "
                "lacks a wait for this COPY"
            ) from None
