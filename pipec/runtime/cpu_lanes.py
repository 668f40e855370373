"""Lanes on the CPU: a worker thread for each lane of each device, real events, and copies that really copy.

What GPUs do with streams, without a GPU. For tests, and for whoever wants every device to own its memory.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextvars import Context as Variables
from functools import partial
from queue import SimpleQueue

from attrs import evolve

from pipec.runtime.channels import Channels, Stopped
from pipec.runtime.context import Context
from pipec.runtime.executor import Device
from pipec.runtime.failure import Failure
from pipec.runtime.lanes import CopyingChannels, Turns, Work, submit_all
from pipec.runtime.program import Op, Route
from pipec.runtime.workers import Workers

Item = tuple[Work | None, tuple[threading.Event, ...], threading.Event]


class CpuLane:
    """A queue that one worker thread empties in order."""

    def __init__(self, queue: SimpleQueue[Item | None]) -> None:
        self.queue = queue

    def submit(self, work: Work | None, after: Sequence[threading.Event]) -> threading.Event:
        """See :class:`pipec.runtime.lanes.WorkLane`. ``work`` must not raise."""
        done = threading.Event()
        self.queue.put((work, tuple(after), done))
        return done


class CpuLanes:
    """Three persistent worker threads per device."""

    def __init__(self, devices: int, name: str) -> None:
        self._workers = Workers([f"pipec {name} lane {number}" for number in range(3 * devices)], _do)
        self._turns = Turns()

    def run(self, devices: Sequence[Device], ops: Sequence[Sequence[Op]], channels: Channels) -> Failure | None:
        """Run all lanes at once; when a task fails, those after it do nothing, and every worker has ended its part."""
        lanes = [CpuLane(queue) for queue in self._workers.start()]
        failures: list[Failure] = []
        step = _Running(devices, channels, Context.capture(), failures)
        ends: list[threading.Event] = []
        pending = True
        while pending:
            try:
                if not ends:
                    ends = submit_all(self._turns.of(devices[0].step.plan, ops), lanes, step.work)
                for end in ends:
                    end.wait()
                pending = False
            except BaseException as caught:  # Ctrl-C while waiting: stop the workers first, then let it through
                failures.insert(0, Failure(None, caught))
                channels.stop()
        first = evolve(failures[0], others=tuple(failures[1:])) if failures else None
        failures.clear()  # frames in the exceptions' own tracebacks hold the list, a cycle
        return first

    def channels(self, routes: tuple[Route, ...]) -> Channels | None:
        return CopyingChannels(routes)

    def close(self) -> None:
        """End the workers and wait for them."""
        self._workers.close()


class _Running:
    """A part of a step, as the work of its tasks."""

    def __init__(
        self, devices: Sequence[Device], channels: Channels, context: Context, failures: list[Failure]
    ) -> None:
        self.devices, self.channels, self.context, self.failures = devices, channels, context, failures
        self.variables: dict[int, Variables] = {}

    def work(self, op: Op) -> Work:
        return partial(self._run, op)

    def _run(self, op: Op) -> None:
        if self.channels.stopped:
            return
        thread = threading.get_ident()  # one context of variables per worker: it cannot be entered twice at once
        if thread not in self.variables:
            self.variables[thread] = self.context.variables.copy()
        try:
            self.variables[thread].run(self._in_context, op)
        except Stopped:
            return
        except BaseException as error:
            self.failures.append(Failure(op, error))
            self.channels.stop()

    def _in_context(self, op: Op) -> None:
        with self.context.active():
            self.devices[op.device].run((op,))


def _do(queue: SimpleQueue[Item | None]) -> bool:
    item = queue.get()
    if item is None:
        return False
    work, after, done = item
    for event in after:
        event.wait()
    if work is not None:
        work()
    del work, item  # a step's tensors must not live until the next one
    done.set()
    return True
