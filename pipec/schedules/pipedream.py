"""PipeDream (arXiv 1806.03377): 1F1B without a flush between minibatches, on stashed weights.

Device i = 1..P holds P - i + 1 microbatches and as many weight versions with one microbatch per minibatch: forwards
read the newest weights, each backward the version its forward read. With N microbatches per minibatch there are
1 + ceil((P - i)/N) versions at most. No device waits in the steady period of balanced stages.
"""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from pipec.rules import Rule, Stash
from pipec.schedules.base import Order, Problem
from pipec.schedules.slots import by_slot, one_f_one_b_slots


@frozen
class PipeDream:
    """1f1b without flush; a backward reads the stashed weights of its forward.

    ``vertical_sync``: every stage reads the version that the first stage read.
    """

    bubble: ClassVar[str] = "0 per period"
    peak: ClassVar[str] = "P-s on device s"
    source: ClassVar[str] = "arXiv 1806.03377"
    asynchronous: ClassVar[bool] = True

    vertical_sync: bool = False
    name: str = "pipedream"
    placement: str = "linear"

    @property
    def weights(self) -> Rule:
        return Stash(self.vertical_sync)

    def order(self, problem: Problem) -> Order:
        return by_slot(problem, one_f_one_b_slots(len(problem.chunks)))
