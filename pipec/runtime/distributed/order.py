"""One order of transfers per rank, for transports that run one after another and wait for both ends, as NCCL does.

A rank issues the COPYs it takes part in by the order of their ids, which is the order of its tasks on all lanes. Two
that follow each other and go to and fro between the same ranks are issued as one group, so that they do not wait for
one another. That the orders of all ranks fit together is proved here, by letting every rank wait for both ends.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from attrs import frozen

from pipec.errors import RunError
from pipec.ir import Kind
from pipec.runtime.program import Op, Route


@frozen
class Transfer:
    """A COPY as one of its ends issues it."""

    task: int
    route: Route

    def told(self, me: int) -> str:
        source, target = self.route
        return f"sends task {self.task} to device {target}" if me == source else (
            f"receives task {self.task} from device {source}"
        )


Order = tuple[tuple[Transfer, ...], ...]  # groups of transfers, issued one after another


def orders_of(ops: Sequence[Sequence[Op]]) -> list[Order]:
    """The order of every rank when all devices run their ``ops``."""
    copies: list[list[Transfer]] = [[] for _ in ops]
    for op in sorted((op for row in ops for op in row if op.kind is Kind.COPY), key=lambda op: op.task):
        for device in op.route:
            copies[device].append(Transfer(op.task, op.route))
    after = [dict(pairwise(one.task for one in row)) for row in copies]
    return [tuple(_grouped(row, ops, after)) for row in copies]


def _grouped(
    row: Sequence[Transfer], ops: Sequence[Sequence[Op]], after: Sequence[dict[int, int]]
) -> list[tuple[Transfer, ...]]:
    """Groups of one rank; the other end of each makes the same, since the rule is one of both ends."""
    made: list[tuple[Transfer, ...]] = []
    taken: set[int] = set()
    for one, other in zip(row, [*row[1:], None], strict=False):
        if one.task in taken:
            continue
        if other is not None and pairs(one, other, ops, after):
            taken.add(other.task)
            made.append((one, other))
        else:
            made.append((one,))
    return made


def pairs(
    one: Transfer, other: Transfer, ops: Sequence[Sequence[Op]], after: Sequence[dict[int, int]]
) -> bool:
    """Whether two transfers are issued as one group by both their ends.

    No other transfer comes between them at either end, and the rank that receives the first can wait with it until what
    it sends back is ready: none of its tasks between the two reads what comes from there.
    """
    source, target = one.route
    if other.route != (target, source) or any(after[end].get(one.task) != other.task for end in one.route):
        return False
    row = ops[target]
    first, last = (bisect_left(row, own.task, key=lambda op: op.task) for own in (one, other))
    return all(route != one.route for op in row[first:last] for route, _ in op.receives)


class Orders:
    """The orders of one rank, by the tasks of all; each is proved to fit those of the others when it is made."""

    def __init__(self, me: int) -> None:
        self._me = me
        self._made: dict[int, tuple[Any, Order]] = {}

    def of(self, ops: Sequence[Sequence[Op]]) -> Order:
        """This rank's order of transfers when all devices run their ``ops``.

        Raises:
            RunError: there is none that fits.
        """
        if id(ops) not in self._made:
            orders = orders_of(ops)
            story = check_orders(orders)
            if story is not None:
                raise RunError(story)
            self._made[id(ops)] = ops, orders[self._me]
        return self._made[id(ops)][1]


def check_orders(orders: Sequence[Order]) -> str | None:
    """Where every rank stands when each waits for both ends of a group before it goes on; None: all come to the end."""
    place = [0] * len(orders)
    left = [set(row[0]) if row else set() for row in orders]
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
                left[me] = set(row[place[me]]) if place[me] < len(row) else set()
                moved = True
    standing = [
        f"  rank {me} {' and '.join(one.told(me) for one in row[place[me]])}"
        for me, row in enumerate(orders) if place[me] < len(row)
    ]
    return "\n".join(["the orders of the ranks' transfers do not fit together:", *standing]) if standing else None


def _peer(one: Transfer, me: int) -> int:
    return one.route[1] if one.route[0] == me else one.route[0]
