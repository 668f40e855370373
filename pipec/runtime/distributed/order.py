"""One order of transfers per rank, for transports that run one after another and wait for both ends, as NCCL does.

A rank issues the COPYs it takes part in by the order of their ids, which is the order of its tasks on all lanes. Two
that follow each other and go to and fro between the same ranks are issued as one group where both are ready at once, so
that they do not wait for one another; where the second is ready later the first goes alone, beside the tasks in
between. Where REDUCE tasks add up over replicas they have their places in the same order: replicas run the same
plan, so all have the same. That the orders of all ranks fit together is proved here, by letting every rank wait for
both ends.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from attrs import frozen

from pipec.errors import RunError
from pipec.ir import Kind
from pipec.runtime.program import Op, Route

REPLICAS = -1  # in a route, the same device of all other replicas


@frozen
class Transfer:
    """A COPY as one of its ends issues it, or a REDUCE: its route leads to ``REPLICAS``.

    ``hosted``: from host memory, so not before the task that the plan lets it wait for.
    """

    task: int
    route: Route
    hosted: bool = False

    def told(self, me: int) -> str:
        source, target = self.route
        if target == REPLICAS:
            return f"adds up in task {self.task}"
        return f"sends task {self.task} to device {target}" if me == source else (
            f"receives task {self.task} from device {source}"
        )


Order = tuple[tuple[Transfer, ...], ...]  # groups of transfers, issued one after another


def orders_of(ops: Sequence[Sequence[Op]], replicas: int = 1) -> list[Order]:
    """The order of every rank of a pipeline when all devices run their ``ops``."""
    rows: list[list[Transfer]] = [[] for _ in ops]
    kinds = (Kind.COPY, Kind.REDUCE) if replicas > 1 else (Kind.COPY,)
    for op in sorted((op for row in ops for op in row if op.kind in kinds), key=lambda op: op.task):
        if op.kind is Kind.REDUCE:
            rows[op.device].append(Transfer(op.task, (op.device, REPLICAS)))
            continue
        for device in op.route if op.route[0] != op.route[1] else ():  # others stay on their device
            rows[device].append(Transfer(op.task, op.route, op.hosted))
    after = [dict(pairwise(one.task for one in row)) for row in rows]
    ready = _ready(ops)
    return [tuple(_grouped(row, ops, after, ready)) for row in rows]


def _ready(ops: Sequence[Sequence[Op]]) -> dict[int, int]:
    """Per COPY when what it carries is there, if a whole backward takes two ticks and every other task one."""
    ready: dict[int, int] = {}
    sent: dict[Route, list[int]] = defaultdict(list)
    ends = [0] * len(ops)
    for op in sorted((op for row in ops for op in row), key=lambda op: op.task):
        if op.kind is Kind.COPY:
            ready[op.task] = ends[op.device]
            sent[op.route].append(ends[op.device])
        elif op.kind not in (Kind.REDUCE, Kind.UPDATE):
            # counts go on from segment to segment of an asynchronous plan: what came before is there
            arrived = [sent[route][min(count, len(sent[route])) - 1] for route, count in op.receives if sent[route]]
            ends[op.device] = max([ends[op.device], *arrived]) + (2 if op.kind is Kind.BACKWARD else 1)
    return ready


def _grouped(
    row: Sequence[Transfer], ops: Sequence[Sequence[Op]], after: Sequence[dict[int, int]], ready: dict[int, int]
) -> list[tuple[Transfer, ...]]:
    """Groups of one rank; the other end of each makes the same, since the rule is one of both ends."""
    made: list[tuple[Transfer, ...]] = []
    taken: set[int] = set()
    for one, other in zip(row, [*row[1:], None], strict=False):
        if one.task in taken:
            continue
        if other is not None and pairs(one, other, ops, after, ready):
            taken.add(other.task)
            made.append((one, other))
        else:
            made.append((one,))
    return made


def pairs(
    one: Transfer, other: Transfer, ops: Sequence[Sequence[Op]], after: Sequence[dict[int, int]], ready: dict[int, int]
) -> bool:
    """Whether two transfers are issued as one group by both their ends.

    No other transfer comes between them at either end, the second is ready when the first is, and the rank that
    receives the first can wait with it for the second: none of its tasks between the two reads what comes from there.
    """
    source, target = one.route
    if target == REPLICAS or other.route != (target, source) or one.hosted or other.hosted:
        return False
    if ready[other.task] > ready[one.task] or any(after[end].get(one.task) != other.task for end in one.route):
        return False
    row = ops[target]
    first, last = (bisect_left(row, own.task, key=lambda op: op.task) for own in (one, other))
    return all(route != one.route for op in row[first:last] for route, _ in op.receives)


class Orders:
    """The orders of one rank, by the tasks of all; each is proved to fit those of the others when it is made."""

    def __init__(self, me: int, replicas: int = 1) -> None:
        self._me, self._replicas = me, replicas
        self._made: dict[int, tuple[Any, Order]] = {}

    def of(self, ops: Sequence[Sequence[Op]]) -> Order:
        """This rank's order of transfers when all devices run their ``ops``.

        Raises:
            RunError: there is none that fits.
        """
        if id(ops) not in self._made:
            orders = orders_of(ops, self._replicas)
            story = check_orders(orders)
            if story is not None:
                raise RunError(f"the plan does not run on GPUs over several processes: {story}")
            self._made[id(ops)] = ops, orders[self._me]
        return self._made[id(ops)][1]


def check_orders(orders: Sequence[Order]) -> str | None:
    """Where every rank stands when each waits for both ends of a group before it goes on; None: all come to the end."""
    place = [0] * len(orders)
    left = [_waited(row, 0) for row in orders]
    moved = True
    while moved:
        moved = False
        for me, row in enumerate(orders):
            while place[me] < len(row):
                for one in [one for one in left[me] if one in left[_peer(one, me)]]:
                    left[_peer(one, me)].discard(one)
                    left[me].discard(one)
                    moved = True
                if left[me]:
                    break
                place[me] += 1
                left[me] = _waited(row, place[me])
                moved = True
    standing = [
        f"  rank {me} {' and '.join(one.told(me) for one in row[place[me]])}"
        for me, row in enumerate(orders) if place[me] < len(row)
    ]
    return "\n".join(["the orders of the ranks' transfers do not fit together:", *standing]) if standing else None


def _waited(row: Order, place: int) -> set[Transfer]:
    """What a rank waits for within its replica, at a place of its order: all replicas come to a REDUCE alike."""
    return {one for one in row[place] if one.route[1] != REPLICAS} if place < len(row) else set()


def _peer(one: Transfer, me: int) -> int:
    return one.route[1] if one.route[0] == me else one.route[0]
