"""Interleaved zero bubble: chunks that loop over the devices as in interleaved 1F1B, with split backwards.

Looping divides the fill of the pipeline by the chunks per device, and the weight halves (arXiv 2401.10241) take
another W off each step of it: at F = B = W and c = 0 the bubble is (P-1)(F+B-W)/v for M a multiple of P, with no more
than P activations on any device (``problem.memory_limit`` in activations lowers that). At other costs near
those the bubble is up to a fifth longer, before :mod:`pipec.schedules.polish` shortens that of small problems.
"""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from pipec.schedules.base import Order, Problem
from pipec.schedules.limits import share_limit
from pipec.schedules.polish import MOVES
from pipec.schedules.rhythm import Rhythm, best_order

LOOPS = (
    Rhythm((2, 1), (2, 1), (4, 1, 5), window=11, patience=0.28),
    Rhythm((3, 1), (1, 3), (2, 1, 2), window=100),
    Rhythm((1, 1), (1, 3), (4, 1, 2), window=100),
    Rhythm((3, 2), (1, 5), (7, 1, 2), slack=1, window=100, patience=0.06),
    Rhythm((3, 3), (2, 3), (4, 1, 3), window=100, patience=0.5),
    Rhythm((1,), (1,), (1, 1, 1), window=3, patience=0.5),
)


@frozen
class InterleavedZeroBubble:
    """interleaved-1f1b with split backwards: less bubble in less memory.

    ``chunks``: per device; None takes as many as there are stages per device. ``moves``: as for zb-v.
    """

    bubble: ClassVar[str] = "(P-1)(F+B-W)/v at v=2, c=0"
    peak: ClassVar[str] = "P"
    source: ClassVar[str] = "arXiv 2401.10241"
    split: ClassVar[bool] = True

    chunks: int | None = None
    name: str = "interleaved-zero-bubble"
    placement: str = "looped"
    moves: int = MOVES

    def order(self, problem: Problem) -> Order:
        return best_order(problem, share_limit(problem, problem.devices), LOOPS, moves=self.moves)
