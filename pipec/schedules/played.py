"""How long given lists take: the devices run them in their order, each task as soon as what it needs is there."""

from __future__ import annotations

from collections.abc import Sequence

from pipec.ir import Kind
from pipec.schedules.base import Op, Problem
from pipec.schedules.greedy import FORWARD, INPUT, WEIGHT, WHOLE, Outcome


def play(problem: Problem, lists: Sequence[list[Op]]) -> Outcome:
    """The same lists with their times under the costs of ``problem``. Takes O(tasks).

    The lists must be free of deadlocks, as those of a run under any costs are.
    """
    owner = [chunk.device for chunk in problem.chunks]
    latency, count = problem.costs.latency, len(owner)
    duration = {
        kind: [problem.cost(Kind(kind), c) for c in range(count)] for kind in (FORWARD, INPUT, WEIGHT, WHOLE)
    }
    sources: list[list[int]] = [[] for _ in range(count)]
    readers: list[list[int]] = [[] for _ in range(count)]
    for source, reader in problem.edges:
        sources[reader].append(source)
        readers[source].append(reader)
    ends: dict[tuple[bool, int, int], float] = {}  # of forwards (False) and of input halves or whole backwards (True)
    waiting: dict[tuple[bool, int, int], list[int]] = {}
    at, free = [0] * problem.devices, [0.0] * problem.devices
    began = [0.0] * problem.devices
    ready = list(range(problem.devices))
    while ready:
        device = ready.pop()
        row = lists[device]
        while at[device] < len(row):
            kind, chunk, m = row[at[device]]
            start, back = free[device], kind != FORWARD
            for other in () if kind == WEIGHT else readers[chunk] if back else sources[chunk]:
                end = ends.get((back, other, m))
                if end is None:
                    waiting.setdefault((back, other, m), []).append(device)
                    break
                start = max(start, end + (latency if owner[other] != device else 0.0))
            else:
                if not at[device]:
                    began[device] = start
                at[device] += 1
                free[device] = start + duration[kind][chunk]
                if kind != WEIGHT:
                    ends[back, chunk, m] = free[device]
                    ready += waiting.pop((back, chunk, m), ())
                continue
            break
    return Outcome(list(lists), max(free), max(f - b for f, b in zip(free, began, strict=True)))
