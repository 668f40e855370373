"""Who holds up all others: a rank that only waits for another one is not to blame."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pipec.runtime.distributed.notes import ALL, NOBODY


class Seen(NamedTuple):
    """What is known of a rank.

    Attributes:
        waits: as in a note; ``NOBODY`` where nothing is known.
        still: its process has stopped to tell that it lives.
    """

    waits: int
    still: bool


def blamed(me: int, first: int, size: int, seen: Callable[[int], Seen]) -> list[int]:
    """The ranks that wait for each other, from ``me`` to the one to blame: it does not wait, or stands still.

    Args:
        me: the rank that asks.
        first: for whom it waits, ``ALL`` for every other one.
        seen: what is known of a rank.

    The nearest one is found, and of those that are equally near one that stands still. Where all wait in a circle, as
    what they wait for was lost, it is the first rank of it.
    """
    ahead = [[me, place] for place in _awaited(me, first + 1 if first != ALL else ALL, size)]
    known = {me}
    while ahead:
        looks = [(path, seen(path[-1])) for path in ahead]
        found = [path for path, one in looks if one.still] + [path for path, one in looks if one.waits == NOBODY]
        if found:
            return found[0]
        known.update(path[-1] for path in ahead)
        further: dict[int, list[int]] = {}
        for path, one in looks:
            for place in _awaited(path[-1], one.waits, size):
                if place not in known:
                    further.setdefault(place, [*path, place])
        ahead = list(further.values())
    return [me, first] if first != ALL else [me]


def _awaited(place: int, waits: int, size: int) -> list[int]:
    """The ranks for whom one waits."""
    if waits == ALL:
        return [other for other in range(size) if other != place]
    return [waits - 1]
