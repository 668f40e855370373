"""PipeMare (arXiv 1910.05124): no flush, no stash; the newest weights everywhere, backwards corrected.

In the paper's fine-grained pipeline device i = 1..P holds 2(P - i) + 1 microbatches, and its forwards read weights
that are (2(P - i) + 1)/N updates older than those of the backward on average. Forward and backward of different
microbatches share a tick, so the steady period of balanced stages has no bubble.
"""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from pipec.rules import Corrected, Live, Rule
from pipec.schedules.base import Order, Problem
from pipec.schedules.slots import by_slot, slots_of


@frozen
class PipeMare:
    """No flush and one weight version; backwards read the newest weights, corrected by their mean change.

    ``inflight``: "full", the paper's 2(P - i) + 1 microbatches on device i, or "1f1b", P - i + 1.
    ``correction``: the decay D of the mean change, "optimal", or None for no correction.
    """

    bubble: ClassVar[str] = "0 per period"
    peak: ClassVar[str] = "2(P-s)-1 on device s"
    source: ClassVar[str] = "arXiv 1910.05124"
    asynchronous: ClassVar[bool] = True

    inflight: str = "full"
    correction: float | str | None = 0.135
    name: str = "pipemare"
    placement: str = "linear"

    @property
    def weights(self) -> Rule:
        return Live() if self.correction is None else Corrected(self.correction)

    def order(self, problem: Problem) -> Order:
        return by_slot(problem, slots_of(self.inflight, len(problem.chunks)))
