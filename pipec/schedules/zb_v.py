"""The V-shaped zero-bubble schedules: two chunks per device, down the devices and back up, with split backwards.

ZB-V (arXiv 2401.10241, section 6) holds what 1F1B holds, P activations, on every device, and with F = B = W and free
hand-overs leaves no bubble inside a device's span: makespan M(F+B+W) + (P-1)/2, the least there is for two chunks.

V-Half and V-Min (arXiv 2405.15362) hold about a half and a third of that, (P+2)//2 and (P+4)//3 activations, for a
larger bubble.

All three are one policy with three caps: the rhythms below, run under the problem's own costs.
``problem.memory_limit`` in activations lowers the cap. Any placement is served; "v" is what the figures are for.
"""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from pipec.schedules.base import Op, Order, Problem
from pipec.schedules.greedy import Keep
from pipec.schedules.limits import share_limit
from pipec.schedules.rhythm import Rhythm, best_order

WIDE = (
    Rhythm((3, 4), (1, 2), (3, 6, 2), slack=2, window=12, patience=0.5),
    Rhythm((3, 3), (1, 3), (1, 3, 1), window=3, patience=0.5),
    Rhythm((1, 3), (4, 3), (3, 3, 5), slack=1, window=12, patience=0.5),
    Rhythm((1, 3), (1, 2), (5, 6, 3), window=20),
    Rhythm((2, 6), (1, 3), (2, 5, 1), window=30, keep=Keep.ROOM, drain=False),
    Rhythm((3, 3), (1, 1), (4, 7, 2), slack=1, window=10, patience=0.51),
)
HALF = (
    Rhythm((1, 3), (1, 1), (7, 4, 6), slack=2, window=11, patience=0.15, keep=Keep.ORDER, drain=False),
    Rhythm((1, 2), (2, 1), (1, 3, 1), window=12, patience=0.5),
    Rhythm((2, 1), (4, 2), (3, 5, 3), slack=1, window=3, patience=1.0),
    Rhythm((2, 3), (2, 2), (2, 6, 6), slack=2, window=12, patience=1.0),
)
NARROW = (
    Rhythm((1, 2), (1, 1), (1, 2, 6), slack=2, window=6),
    Rhythm((2, 1), (1, 1), (3, 1, 3), slack=2, window=12),
    Rhythm((1, 1), (1, 1), (1, 6, 3), slack=2, window=6, patience=0.5),
)
BETWEEN = (  # for caps that none of the three has
    Rhythm((1, 1), (1, 3), (1, 3, 5), window=12, patience=1.0),
    Rhythm((2, 2), (1, 1), (2, 6, 4), window=6, patience=0.5),
    Rhythm((1, 1), (1, 4), (5, 6, 5), slack=2, window=12, keep=Keep.ROOM),
)


def v_order(problem: Problem, shares: float, rhythms: tuple[Rhythm, ...]) -> list[list[Op]]:
    """The best order for at most ``shares`` activations per device, or for the memory limit where that is lower."""
    limit = share_limit(problem, shares)
    return best_order(problem, limit, rhythms if limit == shares else WIDE + HALF + NARROW + BETWEEN)


@frozen
class ZBV:
    """Two chunks per device in a V, split backwards: almost no bubble in 1f1b's memory."""

    bubble: ClassVar[str] = "(P-1)/2, span 0, at F=B=W=1, c=0"
    peak: ClassVar[str] = "P"
    source: ClassVar[str] = "arXiv 2401.10241"
    split: ClassVar[bool] = True

    name: str = "zb-v"
    placement: str = "v"

    def order(self, problem: Problem) -> Order:
        return v_order(problem, problem.devices, WIDE)
