"""Backends: who runs the devices of a step. Threads, a worker per device; replay, one thread for all."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import numpy as np
from attrs import evolve

from pipec.ir import Kind, Plan
from pipec.runtime.channels import Channels, Stopped
from pipec.runtime.context import Context
from pipec.runtime.executor import Device
from pipec.runtime.failure import Failure, describe
from pipec.runtime.grouped import grouped
from pipec.runtime.program import Op, Route
from pipec.runtime.step import Step
from pipec.runtime.workers import Workers

LOG = logging.getLogger("pipec")


class Backend(Protocol):
    """Runs a list of tasks on every device and returns when all have ended, with what one of them raised."""

    def run(self, devices: Sequence[Device], ops: Sequence[Sequence[Op]], channels: Channels) -> Failure | None: ...

    def channels(self, routes: tuple[Route, ...]) -> Channels | None:
        """The channels of a step, None for those that hand over by reference."""

    def close(self) -> None: ...


class Replay:
    """All devices in the calling thread, task by task: in the plan's one order, or tasks of one kind together."""

    def __init__(self, group: bool = False) -> None:
        self._group = group
        self._orders: dict[int, tuple[Any, list[tuple[int, list[Op]]]]] = {}

    def run(self, devices: Sequence[Device], ops: Sequence[Sequence[Op]], channels: Channels) -> Failure | None:
        """Run to the end, or to the first task that raises."""
        if id(ops) not in self._orders:
            self._orders[id(ops)] = ops, runs_of((grouped(ops) if self._group else None) or one_order(ops))
        for device, run in self._orders[id(ops)][1]:
            try:
                devices[device].run(run)
            except BaseException as error:
                return Failure(devices[device].at, error)
        return None

    def channels(self, routes: tuple[Route, ...]) -> Channels | None:
        return None

    def close(self) -> None:
        """Nothing to close."""


def one_order(ops: Sequence[Sequence[Op]]) -> list[Op]:
    """The tasks of all devices in the plan's order."""
    return sorted((op for row in ops for op in row), key=lambda op: op.task)


def runs_of(order: Sequence[Op]) -> list[tuple[int, list[Op]]]:
    """Tasks that follow one another on one device, with the device."""
    runs: list[tuple[int, list[Op]]] = []
    for op in order:
        if not runs or runs[-1][0] != op.device:
            runs.append((op.device, []))
        runs[-1][1].append(op)
    return runs


Job = Callable[[], None]


class Threads:
    """A persistent worker thread per device, started at the first step and again after a fork."""

    def __init__(self, count: int, name: str, watchdog: float | None = None) -> None:
        """``watchdog``: seconds without any task ending after which a warning says where every device stands."""
        self.watchdog = watchdog
        self._workers = Workers([f"pipec {name} device {device}" for device in range(count)], _call)

    def run(self, devices: Sequence[Device], ops: Sequence[Sequence[Op]], channels: Channels) -> Failure | None:
        """Run all devices at once; a failure of one stops the others, and every worker has ended its part then."""
        queues = self._workers.start()
        context = Context.capture()
        jobs = [_Job(device, row, context) for device, row in zip(devices, ops, strict=True)]
        reports: list[tuple[int, BaseException | None]] = []  # a worker's own report, in the order of their ends
        wake: SimpleQueue[None] = SimpleQueue()
        interrupt: list[Failure] = []
        pending = True
        while pending:
            try:
                for job in jobs:
                    queues[job.device.index].put(partial(job.run, reports, wake))
                while len(reports) < len(jobs):
                    self._await(wake, devices)
                pending = False
            except BaseException as caught:  # Ctrl-C while waiting: stop the workers first, then let it through
                interrupt.append(Failure(None, caught))
                channels.stop()
        return _first(devices, reports, interrupt)

    def _await(self, wake: SimpleQueue[None], devices: Sequence[Device]) -> None:
        """Wait for a worker's report; warn when nothing moves for ``watchdog`` seconds."""
        if self.watchdog is None:
            wake.get()
            return
        ended = -1
        while True:
            try:
                wake.get(timeout=self.watchdog)
                return
            except Empty:
                before, ended = ended, sum(1 for end in devices[0].step.ends if end)
                if before == ended:
                    LOG.warning("%s", standstill(devices, self.watchdog))

    def channels(self, routes: tuple[Route, ...]) -> Channels | None:
        return None

    def close(self) -> None:
        """End the workers and wait for them."""
        self._workers.close()


PAYS_FROM = 200_000  # nanoseconds a task takes on average; benchmarks/crossover.py
COUNTED = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


def typical(step: Step) -> float:
    """Nanoseconds that a forward or backward of the step took: the median over the microbatches of each stage's
    forwards and backwards, and the mean of these. Where their numbers differ, as in a part of an asynchronous plan, the
    mean of all."""
    table, ends = step.plan.table, np.array(step.ends)
    counted = np.flatnonzero(np.isin(table.kind, COUNTED) & (ends > 0))
    if not len(counted):
        return 0.0
    keys = table.kind[counted].astype(np.int64) << 32 | table.stage[counted]
    spent = ends[counted] - np.array(step.starts)[counted]
    counts = np.unique(keys, return_counts=True)[1]
    if (counts != counts[0]).any():
        return float(spent.mean())
    columns = spent[np.argsort(keys, kind="stable")].reshape(-1, counts[0])
    return float(np.sort(columns, axis=1)[:, counts[0] // 2].mean())


class Auto:
    """One thread while tasks are so short that threads would only wait for Python's lock, else a thread per device.

    The first step runs in one thread; every step decides for the next from what its tasks took, training and
    evaluation apart; a task that the machine held up changes nothing. Results are the same bits either way.
    """

    def __init__(self, threads: Threads) -> None:
        self._threads, self._replay = threads, Replay(group=True)
        self._overlap: dict[bool, bool] = {}  # by whether the plan trains
        self._counted: dict[bool, tuple[Plan, int]] = {}  # the same: the plan, and how many tasks it counts

    def run(self, devices: Sequence[Device], ops: Sequence[Sequence[Op]], channels: Channels) -> Failure | None:
        """Run to the end, or to the first task that raises."""
        training = devices[0].step.plan.training
        backend: Backend = self._threads if self._overlap.get(training, False) else self._replay
        failure = backend.run(devices, ops, channels)
        if failure is None:
            self._decide(devices[0].step)
        try:
            return failure
        finally:
            del failure  # this frame is in its traceback: a cycle

    def _decide(self, step: Step) -> None:
        plan, training = step.plan, step.plan.training
        known = self._counted.get(training)
        if known is None or known[0] is not plan:
            known = self._counted[training] = plan, int(np.isin(plan.table.kind, COUNTED).sum())
        total = sum(step.ends) - sum(step.starts)
        short = not plan.asynchronous and 2 * total < PAYS_FROM * known[1]  # a median is at most twice the mean
        self._overlap[training] = not short and typical(step) >= PAYS_FROM

    def channels(self, routes: tuple[Route, ...]) -> Channels | None:
        return None

    def close(self) -> None:
        """End the workers, if there are any."""
        self._threads.close()


def standstill(devices: Sequence[Device], seconds: float) -> str:
    """Where every device stands: the task it runs, or the one that waits for another device."""
    lines = [f"pipec: no task has ended for {seconds:g} s"]
    for device in devices:
        op, step = device.at, device.step
        if op is None:
            lines.append(f"  device {device.index} has ended or not begun")
            continue
        verb = "runs" if step.starts[op.task] else "waits to begin"
        lines.append(f"  device {device.index} {verb} {describe(step.plan.graph, op, step.called)}")
    return "\n".join(lines)


def _first(
    devices: Sequence[Device], reports: list[tuple[int, BaseException | None]], interrupt: list[Failure]
) -> Failure | None:
    """What failed first. Empties the lists: frames in the exceptions' own tracebacks hold them, a cycle."""
    failures = interrupt[:1]
    failures += [
        Failure(devices[index].at, error) for index, error in reports if error is not None
    ]
    reports.clear()
    interrupt.clear()
    return evolve(failures[0], others=tuple(failures[1:])) if failures else None


class _Job:
    """A device's part of a step; it runs once, even if it is handed over again after an interrupt."""

    __slots__ = ("_taken", "context", "device", "ops", "variables")

    def __init__(self, device: Device, ops: Sequence[Op], context: Context) -> None:
        self.device, self.ops, self.context = device, ops, context
        self.variables = context.variables.copy()
        self._taken = False  # touched by this device's worker only

    def run(self, reports: list[tuple[int, BaseException | None]], wake: SimpleQueue[None]) -> None:
        if self._taken:
            return
        self._taken = True
        try:
            self.variables.run(self._run)
            reports.append((self.device.index, None))
        except BaseException as error:
            told = isinstance(error, Stopped) and self.device.channels.stopped  # another device failed before
            self.device.channels.stop()
            reports.append((self.device.index, None if told else error))
        wake.put(None)

    def _run(self) -> None:
        with self.context.active():
            self.device.run(self.ops)


def _call(jobs: SimpleQueue[Job | None]) -> bool:
    job = jobs.get()
    if job is not None:
        job()
    return job is not None
