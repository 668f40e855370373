"""Lanes as streams: the calling thread queues every task on its device's streams, in the plan's one order.

Per logical device there are three streams: compute, copy out, copy in. A wait of the plan is an event that one stream
records and another waits for; the host waits for nothing. One thread queues for all devices: Python holds its lock
while it launches, so more threads would take turns, not save time, and in the plan's order an event is always recorded
before anybody waits for it.

Memory. PyTorch's allocator keeps a pool per stream: what is freed may be given at once to the next who asks on the
same stream, as its work comes later there. It knows nothing of other streams. So all that stages see, values,
gradients and what autograd saves, belongs to the pool of the compute stream:

* A value that a copy reads is dropped after the compute stream has waited for the copy. Where the plan frees it in a
  reader's task, that task waits (the plan says so). Where the copy itself is last, the value is held until the task
  after the next one, so that the next one runs beside the copy.
* A value that waits in host memory is copied there by the copy-out stream and back by the copy-in stream, each without
  the host waiting; the memory is pinned.
* A copy arrives in memory of the copy-in stream. The first task that needs it takes it over into the compute stream's
  own memory, a copy on the device; then the copy-in stream waits for that, one copy later, and has its memory back.

So every reference is dropped when its pool's stream has waited for all that use it, whatever stages keep or hand on,
and ``record_stream`` is not needed.

Around a part of a step, streams wait for the caller's stream of their device, and the caller's stream waits for them:
what the caller queued before is done when a task starts, and results can be used on the caller's stream as they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Any, cast

import torch

from pipec.errors import RaceError, RunError
from pipec.ir import Kind, Lane
from pipec.runtime.channels import Channels
from pipec.runtime.executor import Device
from pipec.runtime.failure import Failure
from pipec.runtime.lanes import Turn, Turns
from pipec.runtime.program import NOWHERE, Op, Route
from pipec.runtime.replicas import Replicas
from pipec.runtime.stream_api import Event, Held, StreamApi
from pipec.runtime.stream_clock import StreamClock
from pipec.runtime.stream_inputs import Inputs
from pipec.runtime.stream_replicas import ReplicaStreams
from pipec.runtime.transfer import Copy, copied, duplicate, fill, prepared, tensors

LAG = 1  # works of a lane that may start before memory is taken back, so that its stream seldom stands


class StreamLane:
    """One stream, and the memory of its pool that others still use."""

    def __init__(self, api: StreamApi, device: torch.device, name: str) -> None:
        self.api, self.device, self.name = api, device, name
        self.stream = api.stream(device, name)
        self.turn = 0
        self.held: deque[Held] = deque()
        self.used = False  # in this part of the step

    def begin(self) -> None:
        """Before the next work: take back the memory that is due, after whoever uses it."""
        self.turn += 1
        self.used = True
        while self.held and self.held[0].turn + LAG < self.turn:
            held = self.held.popleft()
            self.api.wait(self.stream, held.event)
            self.api.free(self.stream, held.name, held.payload)

    def hold(self, name: str, payload: Any, event: Event) -> None:
        """Keep memory of this pool until the stream has waited for ``event``."""
        self.held.append(Held(name, [payload], event, self.turn))

    def after(self, events: Sequence[Event]) -> None:
        for event in events:
            self.api.wait(self.stream, event)

    def end(self) -> Event:
        """The event after all that was queued."""
        self.used = False
        return self.api.record(self.stream)


class StreamLanes:
    """The backend for devices with streams."""

    def __init__(
        self, api: StreamApi, devices: Sequence[torch.device], replicas: Replicas | None = None
    ) -> None:
        """``devices``: per logical device the real one; several may share one. ``replicas``: of what their stages
        share."""
        self.api, self.devices, self.replicas = api, list(devices), replicas
        self.lanes: list[StreamLane] = [
            StreamLane(api, device, f"{('compute', 'out', 'in')[lane]} {number}")
            for number, device in enumerate(self.devices) for lane in Lane
        ]
        self._turns = Turns()
        self._ends: list[Event | None] = [None] * len(self.devices)
        self._inputs = Inputs(api, self.lanes)
        self._shared: bool | None = None

    def run(self, devices: Sequence[Device], ops: Sequence[Sequence[Op]], channels: Channels) -> Failure | None:
        """Queue all tasks, or up to the first that raises. Returns when they are queued, not when they have run."""
        streams = cast(StreamChannels, channels)  # as made by channels()
        torch.clear_autocast_cache()  # weights may have changed since
        caches = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(caches and not self._shares(devices))
        step = devices[0].step
        clock = step.clock = step.clock or StreamClock(self.api)
        part = _Part(self, devices, streams, clock)
        failure: Failure | None = None
        self._enter()
        clock.begin((lane.device, lane.stream) for lane in self.lanes)
        try:
            self._inputs.send(devices)
            if part.shared is not None:
                part.shared.send()
            for turn in self._turns.of(step.plan, ops):
                part.at = turn.op
                (part.compute if turn.op.kind is not Kind.COPY else part.copy if turn.into >= 0 else part.host)(turn)
        except BaseException as error:
            failure = Failure(part.at, error)
        torch.set_autocast_cache_enabled(caches)
        torch.clear_autocast_cache()
        try:
            self._leave()
            self._inputs.forget(devices)
        except Exception:  # a device that is lost after an error: what happened first matters
            if failure is None:
                raise
        try:
            return failure
        finally:
            del failure, part  # this frame is in the failure's traceback: a cycle

    def _shares(self, devices: Sequence[Device]) -> bool:
        """Whether a parameter is used on several logical devices: a cast that autocast keeps is one stream's memory."""
        if self._shared is None:
            plan, users = devices[0].step.plan, dict[int, int]()
            where = {stage: chunk.device for chunk in plan.chunks for stage in chunk.stages}
            self._shared = any(
                users.setdefault(id(parameter), where[stage.index]) != where[stage.index]
                for stage in devices[0].stages for _, parameter in stage.named_parameters()
            )
        return self._shared

    def _enter(self) -> None:
        """Every stream waits for what the caller queued, and for the end of the part before, on any stream."""
        api = self.api
        before = {device: api.record(api.caller(device)) for device in dict.fromkeys(self.devices)}
        for number, lane in enumerate(self.lanes):
            api.wait(lane.stream, before[lane.device])
            end = self._ends[number // 3]
            if number % 3 != Lane.COMPUTE and end is not None:
                api.wait(lane.stream, end)

    def _leave(self) -> None:
        """The caller's streams wait for all lanes; then all memory that was held goes back."""
        for number, device in enumerate(self.devices):
            compute, *copies = self.lanes[3 * number : 3 * number + 3]
            compute.after([lane.end() for lane in copies if lane.used])
            self._ends[number] = compute.end()
            self.api.wait(self.api.caller(device), self._ends[number])
        for lane in self.lanes:
            for held in lane.held:
                self.api.free(lane.stream, held.name, held.payload)
            lane.held.clear()

    def channels(self, routes: tuple[Route, ...]) -> Channels | None:
        return StreamChannels(routes, self)

    def close(self) -> None:
        """Nothing to close: streams belong to the process."""


class _Part:
    """A part of a step that is being queued."""

    def __init__(
        self, backend: StreamLanes, devices: Sequence[Device], channels: StreamChannels, clock: StreamClock
    ) -> None:
        self.api, self.lanes, self.inputs = backend.api, backend.lanes, backend._inputs
        self.devices, self.channels, self.clock = devices, channels, clock
        self.events: dict[int, Event] = {}
        self.at: Op | None = None
        self.shared = None if backend.replicas is None else ReplicaStreams(self.api, self.lanes, backend.replicas)

    def compute(self, turn: Turn) -> None:
        """Any task but a COPY."""
        op, lane, device = turn.op, self.lanes[turn.lane], self.devices[turn.op.device]
        lane.begin()
        lane.after([self.events[task] for task in turn.waits if task in self.events])
        if self.shared is not None:
            if op.kind is Kind.REDUCE:
                self._reduce(turn, self.shared)
                return
            lane.after(self.shared.arrived(op.stage))
        if op.kind in (Kind.FORWARD, Kind.RECOMPUTE) and device.stages[op.stage].inputs:
            lane.after(self.inputs.arrived(op.device, op.piece))
        if op.receives:
            received, coming = device.received, self.channels.next
            names = [name for route, count in op.receives for name in coming(route, count - received[route])]
            if names:
                self._take_over(lane, device, op, names)
        start = self.api.mark(lane.stream)
        with self.api.on(lane.stream, what=turn.name):
            if self.shared is None:
                device.run((op,))
            else:
                with self.shared.standing_in(op):
                    device.run((op,))
        self.clock.note(op.task, lane.device, start, self.api.mark(lane.stream))
        if turn.awaited:
            self.events[op.task] = self.api.record(lane.stream)

    def _reduce(self, turn: Turn, shared: ReplicaStreams) -> None:
        """A REDUCE: sums of gradients of replicas to the parameters' devices."""
        op, lane = turn.op, self.lanes[turn.lane]
        device = self.devices[op.device]
        start, end, self.events[op.task] = shared.reduce(turn, device.step.accumulators[op.stage])
        device.run((op,))
        self.clock.note(op.task, lane.device, start, end)

    def _take_over(self, lane: StreamLane, device: Device, op: Op, names: list[str]) -> None:
        """What has arrived becomes the compute stream's own; the copy-in stream has its memory back after that."""
        with self.api.on(lane.stream, what="takes over " + ", ".join(names)):
            for route, count in op.receives:
                device.receive(route, count)
        done = self.api.record(lane.stream)
        for name, payload in self.channels.taken_over():
            self.lanes[3 * op.device + Lane.IN].hold(name, payload, done)

    def copy(self, turn: Turn) -> None:
        """A COPY: at the head of two lanes, done by the copy-out stream."""
        op, out, into = turn.op, self.lanes[turn.lane], self.lanes[turn.into]
        device = self.devices[op.device]
        into.begin()
        out.begin()
        out.after([self.events[task] for task in turn.waits if task in self.events])
        payload = device.store[op.source]
        self.channels.now = turn.name, out, into
        device.run((op,))
        self.clock.note(op.task, out.device, *self.channels.spent)
        done = self.api.record(out.stream)
        into.after([done])
        self.events[op.task] = done
        if op.frees:
            self.lanes[3 * op.device + Lane.COMPUTE].hold(f"{turn.name} sent", payload, done)

    def host(self, turn: Turn) -> None:
        """A COPY to or from host memory, by the stream of its one lane."""
        op, lane = turn.op, self.lanes[turn.lane]
        device = self.devices[op.device]
        lane.begin()
        lane.after([self.events[task] for task in turn.waits if task in self.events])
        payload = device.store[op.source]
        self.channels.now = turn.name, lane, lane
        device.run((op,))
        self.clock.note(op.task, lane.device, *self.channels.spent)
        self.events[op.task] = done = self.api.record(lane.stream)
        if op.frees and op.route is NOWHERE:
            self.lanes[3 * op.device + Lane.COMPUTE].hold(f"{turn.name} sent", payload, done)


class StreamChannels(Channels):
    """Values between devices: each is queued by the copy-out stream into memory of the copy-in stream."""

    def __init__(self, routes: tuple[Route, ...], backend: StreamLanes) -> None:
        super().__init__(routes)
        self._api = backend.api
        self.now: tuple[str, StreamLane, StreamLane]  # the COPY that is being sent: its name and both lanes
        self.spent: tuple[Any, Any]  # marks around the last one
        self._arrived: dict[Route, deque[tuple[int, str, Any]]] = {route: deque() for route in routes}
        self._taken: list[tuple[str, Any]] = []

    def send(self, route: Route, slot: int, payload: Any) -> None:
        name, out, into = self.now
        if out is into:  # from host memory
            made = self._alone(payload, lambda core: torch.empty_like(core, device=into.device))
            self._arrived[route].append((slot, name, made))
            return
        self._check(payload)
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        with self._api.on(into.stream, what=f"memory for {name}"):
            made = copied(payload, lambda tensor: prepared(
                tensor, lambda core: torch.empty_like(core, device=into.device), pairs))
        out.after([self._api.record(into.stream)])
        start = self._api.mark(out.stream)
        with self._api.on(into.stream, out.stream, what=name):
            fill(pairs)
        if any(core.device.type != out.device.type for _, core in pairs):  # from the host: the other device copies it
            out.after([self._api.record(into.stream)])
        self.spent = start, self._api.mark(out.stream)
        self._arrived[route].append((slot, name, made))

    def shift(self, by: int) -> None:
        for route, arrived in self._arrived.items():  # 'v0[4]:0>1 counts as the step did in which it was queued
            self._arrived[route] = deque((slot - by, f"'{name}", payload) for slot, name, payload in arrived)

    def to_host(self, payload: Any) -> Any:
        return self._alone(payload, self._api.host_memory)

    def _alone(self, payload: Any, empty: Copy) -> Any:
        """A copy made by one stream, in memory of its own pool or of the host."""
        name, lane, _ = self.now
        self._check(payload)
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        start = self._api.mark(lane.stream)
        with self._api.on(lane.stream, what=name):
            made = copied(payload, lambda tensor: prepared(tensor, empty, pairs))
            fill(pairs)
        self.spent = start, self._api.mark(lane.stream)
        return made

    def _check(self, payload: Any) -> None:
        for tensor in tensors(payload):
            if tensor.layout is not torch.strided:
                raise RunError(
                    f"{self.now[0]}: a tensor of layout {tensor.layout} cannot leave its device; make it dense"
                )

    def next(self, route: Route, count: int) -> list[str]:
        """The names of the next ``count`` copies of a route; fewer if they were not queued yet."""
        return [name for _, name, _ in islice(self._arrived[route], max(count, 0))]

    def receive(self, route: Route) -> tuple[int, Any]:
        """What was queued next for this device, in memory of the current stream.

        Raises:
            RaceError: nothing was, so the receiver does not wait for the copy.
        """
        if not self._arrived[route]:
            raise RaceError(
                f"a task of device {route[1]} reads what device {route[0]} has not sent; the plan lacks a wait"
            )
        slot, name, payload = self._arrived[route].popleft()
        self._taken.append((f"{name} arrived", payload))
        return slot, copied(payload, duplicate)

    def taken_over(self) -> list[tuple[str, Any]]:
        """What was received since the last call, still in the memory in which it arrived."""
        taken, self._taken = self._taken, []
        return taken
