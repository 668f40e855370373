"""One list scheduler for split backwards: what runs next on each device, under a cap on activations.

The run follows time. A device that is free starts a forward F or an input half I that is ready, the one with the
lowest *rank*: rank = offset of its chunk in the rhythm + period x microbatch. A rhythm says when the tasks of one
microbatch would run if every task took one slot, so ranks keep the devices in step with each other. Costs decide
the rest:

- window: a ready task may overtake tasks that are not ready, but none whose rank is lower by more than the window.
  0 keeps the rhythm's order whatever the costs; infinity takes any task that is ready. With ``drain`` the window
  no longer binds a device whose first chunk has no forward left.
- weight halves W fill gaps: one starts when nothing else can, provided the gap known so far is at least
  ``patience`` x its duration. Memory forces a W when the next task is a forward and the cap is reached.
- order: whether the forwards of a device's chunks keep the order of their ranks (KEEP), may overtake one another
  (MIX), or only run where the oldest microbatch keeps room for all its chunks (ROOM).

An activation counts from the start of F to the end of W. With ROOM and an infinite window the run always ends:
the oldest unfinished microbatch always finds room, so it always moves on. Other rules may come to a stand under a
tight cap, which :func:`run` answers with None.

Microbatches of a chunk keep their order in all three kinds, so gradients are summed in one order.
"""

from __future__ import annotations

from enum import IntEnum
from heapq import heappop, heappush
from math import inf

from attrs import frozen

from pipec.ir import Kind
from pipec.schedules.base import Op, Problem

FORWARD, INPUT, WEIGHT = (int(k) for k in (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT))
WHOLE = int(Kind.BACKWARD)
Ranks = tuple[list[int], list[int]]  # offset per chunk of F and of I


class Keep(IntEnum):
    """What the forwards of one device may do among each other."""

    ORDER = 0
    MIX = 1
    ROOM = 2


@frozen
class Rules:
    """How a device chooses; see the module's text."""

    ranks: Ranks
    period: int
    window: float = inf
    patience: float = 0.0
    keep: Keep = Keep.ROOM
    drain: bool = True
    split: bool = True


@frozen
class Outcome:
    """The lists of a run and how long it took: makespan, the largest span of a device, and idle time."""

    lists: list[list[Op]]
    makespan: float
    span: float


def run(problem: Problem, caps: list[int], rules: Rules) -> Outcome | None:
    """Order ``problem`` by ``rules`` with at most ``caps[d]`` chunk activations on device d, or None at a stand.

    Takes O(tasks x (chunks per device + log devices)).
    """
    return _Run(problem, caps, rules).finish()


class _Device:
    """What one device has run and may run next."""

    def __init__(self, index: int, chunks: tuple[int, ...], cap: int) -> None:
        self.index, self.chunks, self.cap = index, chunks, cap
        self.free = 0.0
        self.began = inf
        self.held = 0
        self.weights: list[tuple[int, int]] = []  # chunk and microbatch whose W can run, oldest first
        self.done = 0  # how many of them have run
        self.ops: list[Op] = []


class _Run:
    def __init__(self, problem: Problem, caps: list[int], rules: Rules) -> None:
        count, size = len(problem.chunks), problem.microbatches
        self.rules, self.size, self.total = rules, size, count * size
        owner = [chunk.device for chunk in problem.chunks]
        self.devices = [_Device(d, problem.on(d), caps[d]) for d in range(problem.devices)]
        self.owner = owner
        kinds = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
        self.cost = [[problem.cost(kind, c) for c in range(count)] for kind in kinds]
        if not rules.split:
            self.cost[1] = [a + b for a, b in zip(self.cost[1], self.cost[2], strict=True)]
        sources: list[list[int]] = [[] for _ in range(count)]
        readers: list[list[int]] = [[] for _ in range(count)]
        for source, reader in problem.edges:
            sources[reader].append(source)
            readers[source].append(reader)
        latency = problem.costs.latency

        def targets(chunk: int, side: int, others: list[int]) -> list[tuple[int, int, float]]:
            return [(side, o, latency if owner[o] != owner[chunk] else 0.0) for o in others]

        # The I of a chunk waits for the I of its readers, which implies its own F; without readers, for that F.
        self.targets = (
            [targets(c, 0, readers[c]) if readers[c] else [(1, c, 0.0)] for c in range(count)],
            [targets(c, 1, sources[c]) for c in range(count)],
        )
        needs = [[len(sources[c]) for c in range(count)], [max(1, len(readers[c])) for c in range(count)]]
        self.missing = [[[n] * size for n in row] for row in needs]
        self.ready = [[[0.0] * size for _ in range(count)] for _ in range(2)]
        self.next = ([0] * count, [0] * count)
        # Of every chunk the rank of its next F and I, and since when it is ready; infinity where unknown or none.
        self.rank: tuple[list[float], list[float]] = (list(rules.ranks[0]), list(rules.ranks[1]))
        self.since: tuple[list[float], list[float]] = ([inf if n else 0.0 for n in needs[0]], [inf] * count)
        self.agenda = [(0.0, d) for d in range(problem.devices)]

    def finish(self) -> Outcome | None:
        agenda, devices, start = self.agenda, self.devices, self.start
        while agenda:
            time, index = heappop(agenda)
            device = devices[index]
            if time >= device.free:
                start(device, time)
        tasks = sum(len(device.ops) for device in devices)
        if tasks < self.total * (3 if self.rules.split else 2):
            return None
        return Outcome(
            [device.ops for device in devices],
            max(device.free for device in devices),
            max(device.free - device.began for device in devices),
        )

    def start(self, device: _Device, time: float) -> None:
        """Start what the rules say on ``device``, or note when to look again."""
        rules, keep, size = self.rules, self.rules.keep, self.size
        forwards, (forward_rank, input_rank), (forward_since, input_since) = self.next[0], self.rank, self.since
        first, head, soon = inf, inf, inf
        best, side, chosen = inf, 0, -1
        for chunk in device.chunks:
            rank = forward_rank[chunk]
            if rank < first:
                first = rank
            rank = input_rank[chunk]
            if rank < head:
                head = rank
            at = input_since[chunk]
            if at > time:
                if at < soon:
                    soon = at
            elif rank < best:
                best, side, chosen = rank, 1, chunk
        tail = forwards[device.chunks[0]] == size if device.chunks else True  # no microbatch enters any more
        limit = inf if tail and rules.drain else min(head, first) + rules.window
        full, blocked = device.held >= device.cap, False
        if first < inf:
            for chunk in device.chunks:
                rank, at = forward_rank[chunk], forward_since[chunk]
                if rank > best or at == inf or ((rank > first or keep is Keep.ROOM) and (
                        keep is Keep.ORDER or not self.fits(device, chunk))):
                    continue
                if full:
                    blocked = blocked or (at <= time and rank <= limit)
                elif at > time:
                    if at < soon:
                        soon = at
                elif rank < best:
                    best, side, chosen = rank, 0, chunk
        if best > limit:
            chosen = -1
        if (chosen < 0 or blocked) and device.done < len(device.weights):
            chunk, m = device.weights[device.done]
            span = self.cost[2][chunk]
            if blocked or soon - time >= rules.patience * span:
                device.done += 1
                device.held -= 1
                device.ops.append((WEIGHT, chunk, m))
                device.free = time + span
                heappush(self.agenda, (device.free, device.index))
                return
        if chosen >= 0:
            self.launch(device, side, chosen, time)
        elif soon < inf:
            heappush(self.agenda, (soon, device.index))

    def fits(self, device: _Device, chunk: int) -> bool:
        """Whether the next F of ``chunk`` leaves room for those of the oldest microbatch that is still to enter."""
        forwards = self.next[0]
        oldest = min(forwards[c] for c in device.chunks)
        if forwards[chunk] == oldest:
            return True
        pending = sum(forwards[c] == oldest for c in device.chunks)
        return device.held + 1 + pending <= device.cap

    def launch(self, device: _Device, side: int, chunk: int, time: float) -> None:
        """Run the next F (side 0) or I (side 1) of ``chunk`` and tell those that wait for it."""
        m = self.next[side][chunk]
        self.next[side][chunk] = m + 1
        if m + 1 == self.size:
            self.rank[side][chunk] = self.since[side][chunk] = inf
        else:
            self.rank[side][chunk] += self.rules.period
            self.since[side][chunk] = inf if self.missing[side][chunk][m + 1] else self.ready[side][chunk][m + 1]
        end = device.free = time + self.cost[side][chunk]
        if not device.ops:
            device.began = time
        if side == 0:
            device.held += 1
            device.ops.append((FORWARD, chunk, m))
        elif self.rules.split:
            device.weights.append((chunk, m))
            device.ops.append((INPUT, chunk, m))
        else:
            device.held -= 1
            device.ops.append((WHOLE, chunk, m))
        heappush(self.agenda, (end, device.index))
        for to, other, delay in self.targets[side][chunk]:
            ready, missing = self.ready[to][other], self.missing[to][other]
            if end + delay > ready[m]:
                ready[m] = end + delay
            missing[m] -= 1
            if missing[m]:
                continue
            if self.next[to][other] == m:
                self.since[to][other] = ready[m]
            owner = self.owner[other]
            if owner != device.index:
                heappush(self.agenda, (max(ready[m], self.devices[owner].free), owner))
