"""Live weights (PACI, arXiv 2606.07881): the newest weights everywhere, with an update after every few backwards.

Nothing is stashed, predicted or corrected: the more gradients an update gathers, the fewer updates lie between a
forward and its backward, (P - i)/a on average at device i = 1..P.
"""

from __future__ import annotations

from typing import ClassVar

from attrs import field, frozen

from pipec.errors import ScheduleError
from pipec.rules import Live, Rule
from pipec.schedules.base import Order, Problem
from pipec.schedules.slots import by_slot, slots_of


def _every(value: int | None) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ScheduleError(f"every must be a whole number of backwards, at least 1, got {value!r}")
    return value


@frozen
class LiveWeights:
    """1f1b without flush; forwards and backwards read the newest weights as they are.

    ``every``: backwards of a stage per update; it divides the microbatches of a minibatch. None: all of them.
    ``inflight``: "1f1b", P - i + 1 microbatches on device i, or "full", 2(P - i) + 1.
    """

    bubble: ClassVar[str] = "0 per period"
    peak: ClassVar[str] = "P-s on device s"
    source: ClassVar[str] = "arXiv 2606.07881"
    asynchronous: ClassVar[bool] = True

    every: int | None = field(default=None, converter=_every)
    inflight: str = "1f1b"
    name: str = "live-weights"
    placement: str = "linear"

    @property
    def weights(self) -> Rule:
        return Live(self.every)

    def order(self, problem: Problem) -> Order:
        return by_slot(problem, slots_of(self.inflight, len(problem.chunks)), self.every)
