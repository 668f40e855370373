"""Several chunks on one device: per-chunk sequences joined into one list per device."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from pipec.errors import ScheduleError
from pipec.ir import Kind
from pipec.schedules.base import Op, Problem

_SHORT = 1e-9  # a task that costs nothing still takes time here, so that time always moves on


def per_device(problem: Problem, sequences: Sequence[Sequence[Op]]) -> list[list[Op]]:
    """Per-device lists from one sequence per chunk: as they are with one chunk a device, else merged."""
    if len(problem.chunks) > problem.devices:
        return merge(problem, sequences)
    return [[op for c in problem.on(device) for op in sequences[c]] for device in range(problem.devices)]


def merge(problem: Problem, sequences: Sequence[Sequence[Op]]) -> list[list[Op]]:
    """Per-chunk sequences joined into per-device lists in the order in which they would run.

    Every device starts, among the next ops of its chunks, the one that is ready first (backwards before
    forwards, then forwards of early and backwards of late chunks, on a tie). The result follows an
    execution, so it cannot deadlock; sequences that no order can run are left to the linearising pass,
    which reports where every device stands. Takes O(ops x log chunks) for a bounded number of edges per
    chunk.

    Raises:
        ScheduleError: not one sequence per chunk.
    """
    if len(sequences) != len(problem.chunks):
        raise ScheduleError(
            f"merge needs one sequence per chunk: got {len(sequences)} for {len(problem.chunks)} chunks"
        )
    clock = _Clock(problem, sequences)
    clock.run()
    return clock.lists


class _Clock:
    """One run over time. Each device keeps two heaps of chunks whose next op has all it needs: those ready by
    the time the device is free, by rank, and those ready later, by time."""

    def __init__(self, problem: Problem, sequences: Sequence[Sequence[Op]]) -> None:
        count = len(sequences)
        self.sequences = sequences
        self.owner = [chunk.device for chunk in problem.chunks]
        self.latency = problem.costs.latency
        self.sources: list[list[int]] = [[] for _ in range(count)]
        self.readers: list[list[int]] = [[] for _ in range(count)]
        for source, reader in problem.edges:
            self.sources[reader].append(source)
            self.readers[source].append(reader)
        self.duration = {
            (int(kind), c): problem.cost(kind, c) or _SHORT
            for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
            for c in range(count)
        }
        self.ends: dict[Op, float] = {}  # a whole backward counts as its input half, which readers wait for
        self.waiting: dict[Op, list[int]] = {}
        self.position = [0] * count
        self.free = [0.0] * problem.devices
        self.now: list[list[tuple[int, int, int]]] = [[] for _ in range(problem.devices)]
        self.later: list[list[tuple[float, int]]] = [[] for _ in range(problem.devices)]
        self.agenda: list[tuple[float, int]] = []  # (time, device): the device may be able to start something
        self.lists: list[list[Op]] = [[] for _ in range(problem.devices)]

    def run(self) -> None:
        for chunk in range(len(self.sequences)):
            self.offer(chunk)
        while self.agenda:
            time, device = heappop(self.agenda)
            if time < self.free[device]:
                continue  # stale: an op was started meanwhile, which entered the device again
            now, later = self.now[device], self.later[device]
            while later and later[0][0] <= time:
                chunk = heappop(later)[1]
                heappush(now, self.rank(chunk))
            if now:
                self.start(heappop(now)[2], time)
                self.wake(device)
        for chunk, ops in enumerate(self.sequences):
            self.lists[self.owner[chunk]] += ops[self.position[chunk] :]

    def rank(self, chunk: int) -> tuple[int, int, int]:
        kind = self.sequences[chunk][self.position[chunk]][0]
        return (-kind, -chunk if kind else chunk, chunk)

    def needs(self, op: Op) -> list[Op]:
        kind, chunk, m = op
        if kind == Kind.FORWARD:
            return [(0, source, m) for source in self.sources[chunk]]
        if kind == Kind.BACKWARD_WEIGHT:
            return [(3, chunk, m)]
        return [(0, chunk, m), *((3, reader, m) for reader in self.readers[chunk])]

    def offer(self, chunk: int) -> None:
        """Enter the next op of ``chunk`` with its device, or note what it waits for."""
        if self.position[chunk] == len(self.sequences[chunk]):
            return
        device, latest = self.owner[chunk], 0.0
        for need in self.needs(self.sequences[chunk][self.position[chunk]]):
            end = self.ends.get(need)
            if end is None:
                self.waiting.setdefault(need, []).append(chunk)
                return
            latest = max(latest, end if self.owner[need[1]] == device else end + self.latency)
        heappush(self.later[device], (latest, chunk))
        self.wake(device)

    def wake(self, device: int) -> None:
        if self.now[device]:
            heappush(self.agenda, (self.free[device], device))
        elif self.later[device]:
            heappush(self.agenda, (max(self.free[device], self.later[device][0][0]), device))

    def start(self, chunk: int, time: float) -> None:
        op = self.sequences[chunk][self.position[chunk]]
        kind, _, m = op
        device = self.owner[chunk]
        self.position[chunk] += 1
        self.lists[device].append(op)
        end = time + self.duration[kind, chunk]
        self.free[device] = end
        made = (int(Kind.BACKWARD_INPUT), chunk, m) if kind == Kind.BACKWARD else op
        self.ends[made] = end
        self.offer(chunk)
        for other in self.waiting.pop(made, ()):
            self.offer(other)
