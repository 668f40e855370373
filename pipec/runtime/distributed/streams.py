"""A rank on a GPU: its tasks are queued on the caller's stream, and the host goes on.

The rank has one logical device, so its tasks need one stream for compute, and that is the caller's current one: what
the script has queued before a step is done when its tasks start, and parameters, gradients, losses and outputs can be
used after it as they are. Inputs from the host come by a stream of their own, values of other ranks by a carrier.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic, perf_counter_ns, sleep
from typing import Any, cast

import torch

from pipec.errors import RankError
from pipec.ir import Kind, Lane, Plan
from pipec.runtime.channels import Stopped
from pipec.runtime.distributed.backend import RankBackend, RankDevice
from pipec.runtime.distributed.hosting import HostMemory
from pipec.runtime.distributed.ordered import OrderedChannels
from pipec.runtime.distributed.overlap import RankOverlappedDevice
from pipec.runtime.executor import RECORDED, Device
from pipec.runtime.program import Op
from pipec.runtime.record import profiling
from pipec.runtime.stream_api import Event, StreamApi
from pipec.runtime.stream_clock import StreamClock
from pipec.runtime.stream_inputs import Inputs
from pipec.runtime.stream_lanes import StreamLane

NAP = 1e-4  # seconds between two looks whether a device has ended


class RankClock(StreamClock):
    """Times on the host's clock: its zero, when the device reached the step, is now, as steps end with their tasks."""

    def __init__(self, api: StreamApi) -> None:
        super().__init__(api)
        self._now = perf_counter_ns()

    def write(self, starts: list[int], ends: list[int]) -> None:
        """Put the times of all tasks, in nanoseconds of the host, in place of those at which it queued them."""
        super().write(starts, ends)
        for task in self._marks:
            starts[task] += self._now
            ends[task] += self._now


class RankStreams:
    """The streams of one rank.

    Attributes:
        memory: where its tensors are.
        out: copies to the host, for values that go through it.
        gone: channels of a step that lost a rank: their memory is still written to, or read.
    """

    def __init__(self, api: StreamApi, memory: torch.device, me: int) -> None:
        """``me``: the rank's logical device."""
        self.api, self.memory = api, memory
        self._into = StreamLane(api, memory, f"in {me}")
        self.out = api.stream(memory, f"out {me}")
        self.inputs = Inputs(api, {3 * me + Lane.IN: self._into})
        self._names: dict[int, tuple[Any, dict[int, str]]] = {}
        self._end: Event | None = None
        self.gone: list[OrderedChannels] = []

    @property
    def compute(self) -> Any:
        """The caller's stream."""
        return self.api.caller(self.memory)

    def hosts(self) -> HostMemory:
        """For what waits in host memory in one run of a task list."""
        return HostMemory(self.api, self.compute, self.out, self._into, self.memory)

    def names(self, plan: Plan, ops: Sequence[Op]) -> dict[int, str]:
        """The tasks of ``ops`` as the plan prints them."""
        if id(ops) not in self._names:
            self._names[id(ops)] = ops, {op.task: str(plan.table.task(op.task)) for op in ops}
        return self._names[id(ops)][1]

    def _enter(self, device: Device) -> StreamClock:
        """Before a part of a step: the caller may have changed streams since the last one; copies of inputs may begin
        when its stream has come so far."""
        step = device.step
        if self._end is not None:
            self.api.wait(self.compute, self._end)
        self.api.wait(self._into.stream, self.api.record(self.compute))
        if step.clock is None:
            step.clock = RankClock(self.api)
        step.clock.begin([(self.memory, self.compute)])
        self.inputs.send([device])
        return step.clock

    def _leave(self, device: Device) -> None:
        """After it, whatever happened: inputs go when nothing reads them any more."""
        if self._into.used:
            self.api.wait(self.compute, self._into.end())
        self._end = self.api.record(self.compute)
        self.inputs.forget([device])

    def run(self, device: Device, ops: Sequence[Op]) -> None:
        """Queue tasks in order; as :meth:`pipec.runtime.executor.Device.run`, on streams.

        Raises:
            Stopped: another rank failed.
            BaseException: whatever a stage raised; ``device.at`` is the task it came from.
        """
        try:
            clock = self._enter(device)
            self._queue(device, ops, clock)
        except BaseException:
            with suppress(Exception):  # a device that is lost after an error: what happened first matters
                self._leave(device)
            raise
        self._leave(device)

    def _queue(self, device: Device, ops: Sequence[Op], clock: StreamClock) -> None:
        api, compute, step, store = self.api, self.compute, device.step, device.store
        channels = cast(OrderedChannels, device.channels)
        handlers = RECORDED if profiling() else device.handlers
        names = self.names(step.plan, ops)
        for op in ops:
            if channels.stopped:
                raise Stopped
            device.at = op
            name = names[op.task]
            channels.look(op.task, name)
            for route, count in op.receives:
                if device.received[route] < count:
                    with api.on(compute, what=f"receives for {name}"):
                        device.receive(route, count)
            if op.kind in (Kind.FORWARD, Kind.RECOMPUTE):
                for event in self.inputs.arrived(device.index, op.piece):
                    api.wait(compute, event)
            start = api.mark(compute)
            step.starts[op.task] = perf_counter_ns()
            with api.on(compute, what=name):
                handlers[op.kind](device, op)
            step.ends[op.task] = perf_counter_ns()
            clock.note(op.task, self.memory, start, api.mark(compute))
            for slot in op.frees:
                store[slot] = None
        device.at = None

    def ended(self, timeout: float, given_up: Callable[[], bool] = lambda: False) -> bool:
        """Wait until all that was queued has ended; False: it has not within ``timeout`` seconds, or was given up.

        The host looks again and again instead of waiting for the device: where a rank is gone, the device waits for it
        for ever.
        """
        event, end = self.api.record(self.compute), monotonic() + timeout
        while not self.api.past(event):
            if monotonic() > end or given_up():
                return False
            sleep(NAP)
        return True


class Queued(Device):
    """A device that queues its tasks on the streams of its rank."""

    def __init__(self, streams: RankStreams, *args: Any) -> None:
        self._streams = streams
        super().__init__(*args)

    def run(self, ops: Any) -> None:
        self._streams.run(self, ops)


class StreamDevice(Queued, RankDevice):
    """The device of a rank with streams."""


class StreamOverlappedDevice(Queued, RankOverlappedDevice):
    """The same in an asynchronous plan."""

    def run(self, ops: Any) -> None:
        """Queue tasks in order, then take in what later segments read."""
        super().run(ops)
        with self._streams.api.on(self._streams.compute, what="receives for later"):
            self.take_in()


class StreamBackend(RankBackend):
    """Queues the list of one device; returns when it is queued, not when it has run."""

    def __init__(self, streams: RankStreams, ranks: Sequence[int], me: int) -> None:
        super().__init__(ranks, me)
        self._streams = streams

    def drain(self, device: Device, left: Sequence[Op], own: Sequence[Op], channels: Any, story: Any) -> None:
        """REDUCE tasks have places in the order of transfers."""
        pending = {op.task for op in left if op.kind is Kind.REDUCE}
        try:
            with self._streams.api.on(self._streams.compute, what="gives up"):
                channels.drain(own, story, pending, lambda op: device.step.reduce(op.stage, True))
        except RankError:
            raise
        except RuntimeError as error:  # the device is lost: it can do no more for the others
            channels.broken = RankError(story[1], story[0])
            raise channels.broken from error

    def farewell(self, channels: Any, story: Any) -> None:
        self._streams.gone.append(channels)
        super().farewell(channels, story)
