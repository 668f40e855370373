"""One order of all devices' tasks for a single thread, in which tasks of one kind follow one another.

Each device's own order stays, so do its live values. A forward after a forward finds its code in the processor's
caches; where forwards and backwards of tiny tasks alternate, they cost up to a fifth more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from heapq import heappop, heappush

from pipec.ir import Kind
from pipec.runtime.program import Op, Route


def grouped(ops: Sequence[Sequence[Op]]) -> list[Op] | None:
    """The tasks of all devices, each after what it receives; None when one receives what no task here sends."""
    place = [0] * len(ops)
    sent: dict[Route, int] = defaultdict(int)
    blocked: dict[Route, int] = {}  # the device that waits for a route
    ready: dict[Kind, list[tuple[int, int]]] = defaultdict(list)  # heaps of (task, device)
    order: list[Op] = []

    def head(device: int) -> Op | None:
        """The device's next task, if it has what it receives."""
        if place[device] == len(ops[device]):
            return None
        op = ops[device][place[device]]
        for route, count in op.receives:
            if sent[route] < count:
                blocked[route] = device
                return None
        return op

    def look(device: int) -> None:
        if (op := head(device)) is not None:
            heappush(ready[op.kind], (op.task, device))

    for device in range(len(ops)):
        look(device)
    kind = Kind.FORWARD
    while any(ready.values()):
        _, device = heappop(ready[kind] or min(heap for heap in ready.values() if heap))
        following = head(device)
        kind = following.kind if following is not None and following.kind is not Kind.COPY else kind
        while following is not None and following.kind in (kind, Kind.COPY):
            order.append(following)
            place[device] += 1
            if following.kind is Kind.COPY:
                sent[following.route] += 1
                if following.route in blocked:
                    look(blocked.pop(following.route))
            following = head(device)
        if following is not None:
            heappush(ready[following.kind], (following.task, device))
    return order if len(order) == sum(map(len, ops)) else None
