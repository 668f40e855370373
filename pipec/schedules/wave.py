"""Wave-like pipelining (Hanayo, arXiv 2308.15762): whole backwards on a placement that turns round at its ends.

A microbatch runs down the devices and back up, so the last device hands over to itself and the first backward starts
where the last forward ended. At F = B = W and c = 0 one wave leaves a bubble of
2(P-1), two thirds of 1F1B's, in no more than P activations
(``problem.memory_limit`` in activations lowers that). One wave is placement "v"; for more waves give the placement
as a list, 0 1 2 2 1 0 0 1 2 2 1 0 for two waves on three devices.
"""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from pipec.schedules.base import Order, Problem
from pipec.schedules.limits import share_limit
from pipec.schedules.rhythm import best_order
from pipec.schedules.zb_v import HALF, WIDE


@frozen
class Wave:
    """Two chunks per device in a V with whole backwards: two thirds of 1f1b's bubble."""

    bubble: ClassVar[str] = "2(P-1) at F=B=W=1, c=0"
    peak: ClassVar[str] = "P"
    source: ClassVar[str] = "arXiv 2308.15762"

    name: str = "wave"
    placement: str = "v"

    def order(self, problem: Problem) -> Order:
        return best_order(problem, share_limit(problem, problem.devices), WIDE + HALF, split=False)
