"""Backends: who runs the devices of a step. Threads, a worker per device; replay, one thread for all."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Protocol

from pipec.runtime.channels import Channels, Stopped
from pipec.runtime.context import Context
from pipec.runtime.executor import Device
from pipec.runtime.failure import TaskFailure
from pipec.runtime.program import Op


class Backend(Protocol):
    """Runs a list of tasks on every device and returns when all have ended."""

    def run(self, devices: Sequence[Device], ops: Sequence[Sequence[Op]], channels: Channels) -> None: ...

    def close(self) -> None: ...


class Replay:
    """All devices in the calling thread, task by task in the plan's one order."""

    def run(self, devices: Sequence[Device], ops: Sequence[Sequence[Op]], channels: Channels) -> None:
        """Run to the end.

        Raises:
            TaskFailure: holding what a task raised.
        """
        order = ops[0] if len(ops) == 1 else sorted((op for row in ops for op in row), key=lambda op: op.task)
        at = 0
        while at < len(order):  # runs of tasks on one device share one loop
            device, end = order[at].device, at + 1
            while end < len(order) and order[end].device == device:
                end += 1
            try:
                devices[device].run(order[at:end])
            except Stopped:
                raise
            except BaseException as error:
                raise TaskFailure(devices[device].at, error) from None
            at = end

    def close(self) -> None:
        """Nothing to close."""


Job = Callable[[], None]


class Threads:
    """A persistent worker thread per device, started at the first step and again after a fork."""

    def __init__(self, count: int, name: str) -> None:
        self.count, self.name = count, name
        self._jobs: list[SimpleQueue[Job | None]] = []
        self._process = -1
        self._finalizer: Any = None

    def _start(self) -> None:
        if self._process == os.getpid() and self._jobs:
            return
        if self._finalizer is not None:
            self._finalizer.detach()  # a fork left the parent's threads behind
        self._process = os.getpid()
        self._jobs = [SimpleQueue() for _ in range(self.count)]
        self._finalizer = weakref.finalize(self, _stop, self._jobs)
        for device, jobs in enumerate(self._jobs):
            threading.Thread(target=_work, args=(jobs,), name=f"pipec {self.name} device {device}", daemon=True).start()

    def run(self, devices: Sequence[Device], ops: Sequence[Sequence[Op]], channels: Channels) -> None:
        """Run all devices at once.

        Raises:
            TaskFailure: holding what the first task to fail raised; every worker has ended its part by then.
        """
        self._start()
        context = Context.capture()
        done: SimpleQueue[tuple[int, BaseException | None]] = SimpleQueue()
        for device, row in zip(devices, ops, strict=True):
            self._jobs[device.index].put(_job(device, row, context, done))
        failures: list[TaskFailure] = []
        left, interrupt = len(devices), None
        while left:
            try:
                index, error = done.get()
            except BaseException as caught:  # Ctrl-C while waiting: stop the workers first, then let it through
                interrupt = caught
                channels.stop()
                continue
            left -= 1
            if error is not None and not isinstance(error, Stopped):
                failures.append(TaskFailure(devices[index].at, error))
                channels.stop()
        if interrupt is not None:
            raise interrupt
        if failures:
            failures[0].others = failures[1:]
            raise failures[0]

    def close(self) -> None:
        """End the workers."""
        if self._finalizer is not None:
            self._finalizer()
        self._jobs = []


def _job(device: Device, ops: Sequence[Op], context: Context, done: SimpleQueue[Any]) -> Job:
    def job() -> None:
        error: BaseException | None = None
        try:
            with context.active():
                device.run(ops)
        except BaseException as caught:
            error = caught
            device.channels.stopped = True
        done.put((device.index, error))

    variables = context.variables.copy()
    return lambda: variables.run(job)


def _work(jobs: SimpleQueue[Job | None]) -> None:
    while True:
        job = jobs.get()
        if job is None:
            return
        job()
        job = None  # a step's tensors must not live until the next one


def _stop(jobs: list[SimpleQueue[Job | None]]) -> None:
    for queue in jobs:
        queue.put(None)
