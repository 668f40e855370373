"""VHalf (arXiv 2405.15362): the V of zb-v under a lower cap; see :mod:`pipec.schedules.zb_v`."""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from pipec.schedules.base import Order, Problem
from pipec.schedules.polish import MOVES
from pipec.schedules.zb_v import HALF, v_order


@frozen
class VHalf:
    """zb-v in half the memory, for a small bubble.

    ``moves``: as for zb-v.
    """

    bubble: ClassVar[str] = "1.5P-3.5 at F=B=W=1, c=0, even P"
    peak: ClassVar[str] = "(P+2)//2"
    source: ClassVar[str] = "arXiv 2405.15362"
    split: ClassVar[bool] = True

    name: str = "v-half"
    placement: str = "v"
    moves: int = MOVES

    def order(self, problem: Problem) -> Order:
        return v_order(problem, (problem.devices + 2) // 2, HALF, self.moves)
