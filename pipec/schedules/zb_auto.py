"""ZB-1p and ZB-2p (arXiv 2401.10241, section 3): zero bubble on one chunk per device, ordered by the costs.

The paper searches for them automatically; here they are greedy runs under the problem's costs with at most P, or 2P,
activations per device, the best of which is polished where the problem is small (:mod:`pipec.schedules.polish`). With
F = B = W they end when ZB-H1 and ZB-H2 do; with other costs, unequal stages or hand-overs they are faster.
"""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from pipec.schedules.base import Order, Problem
from pipec.schedules.limits import share_limit
from pipec.schedules.polish import MOVES
from pipec.schedules.rhythm import Rhythm, best_order

STEPS = (
    *(Rhythm((1,), (1,), (1, 1, 1), window=window, patience=patience)
      for window in (0.0, 1.5, 3.0, 6.0, 100.0) for patience in (0.0, 0.5, 1.0)),
    Rhythm((1,), (1,), (1, 1, 1), slack=1, window=1.5),
    Rhythm((1,), (3,), (1, 2, 1), window=1.5),
)


@frozen
class ZB1P:
    """Split backwards ordered by the costs, in 1f1b's memory.

    ``moves``: how many changed orders to try where the problem is small enough, see :mod:`pipec.schedules.polish`.
    """

    bubble: ClassVar[str] = "(P-1)(F+B-W) at c=0"
    peak: ClassVar[str] = "P"
    source: ClassVar[str] = "arXiv 2401.10241"
    split: ClassVar[bool] = True

    name: str = "zb-1p"
    placement: str = "linear"
    moves: int = MOVES

    def order(self, problem: Problem) -> Order:
        return best_order(problem, share_limit(problem, problem.devices), STEPS, moves=self.moves)


@frozen
class ZB2P:
    """Split backwards ordered by the costs, in twice 1f1b's memory and almost without bubble.

    ``moves``: as for zb-1p.
    """

    bubble: ClassVar[str] = "span (P-1)(F+B-2W) at c=0"
    peak: ClassVar[str] = "2P"
    source: ClassVar[str] = "arXiv 2401.10241"
    split: ClassVar[bool] = True

    name: str = "zb-2p"
    placement: str = "linear"
    moves: int = MOVES

    def order(self, problem: Problem) -> Order:
        return best_order(problem, share_limit(problem, 2 * problem.devices), STEPS, moves=self.moves)
