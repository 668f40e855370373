"""VMin (arXiv 2405.15362): the V of zb-v under a lower cap; see :mod:`pipec.schedules.zb_v`."""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from pipec.schedules.base import Order, Problem
from pipec.schedules.polish import MOVES
from pipec.schedules.zb_v import NARROW, v_order


@frozen
class VMin:
    """zb-v in a third of the memory, for about the bubble of 1f1b.

    ``moves``: as for zb-v.
    """

    bubble: ClassVar[str] = "5.5, 8.5, 13.5 for P=4, 6, 8 at F=B=W=1, c=0"
    peak: ClassVar[str] = "(P+4)//3"
    source: ClassVar[str] = "arXiv 2405.15362"
    split: ClassVar[bool] = True

    name: str = "v-min"
    placement: str = "v"
    moves: int = MOVES

    def order(self, problem: Problem) -> Order:
        return v_order(problem, (problem.devices + 4) // 3, NARROW, self.moves)
