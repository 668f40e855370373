"""Nesterov look-ahead in an asynchronous pipeline (arXiv 2505.01099): the update itself leans against the delay.

d(t) = g (w(t) - w(t-1)); w(t+1) = w(t) + d(t) - lr (1 - g) grad.
"""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from pipec.rules import Nesterov as NesterovRule
from pipec.rules import Rule
from pipec.schedules.base import Order, Problem
from pipec.schedules.slots import by_slot, slots_of


@frozen
class Nesterov:
    """1f1b without flush; every update looks ahead along the last change of the weights.

    ``momentum``: g. ``stash``: backwards read the weights that their forwards read, else the newest.
    ``inflight``: "1f1b", P - i + 1 microbatches on device i, or "full", 2(P - i) + 1.
    """

    bubble: ClassVar[str] = "0 per period"
    peak: ClassVar[str] = "P-s on device s"
    source: ClassVar[str] = "arXiv 2505.01099"
    asynchronous: ClassVar[bool] = True

    momentum: float = 0.99
    stash: bool = True
    inflight: str = "1f1b"
    name: str = "nesterov"
    placement: str = "linear"

    @property
    def weights(self) -> Rule:
        return NesterovRule(self.momentum, self.stash)

    def order(self, problem: Problem) -> Order:
        return by_slot(problem, slots_of(self.inflight, len(problem.chunks)))
