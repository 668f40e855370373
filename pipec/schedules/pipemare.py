"""PipeMare (arXiv 1910.05124): no flush, no stash; the newest weights everywhere, backwards corrected.

In the paper's fine-grained pipeline device i = 1..P holds 2(P - i) + 1 microbatches, and its forwards read weights
that are (2(P - i) + 1)/N updates older than those of the backward on average. Forward and backward of different
microbatches share a tick, so the steady period of balanced stages has no bubble.
"""

from __future__ import annotations

from typing import ClassVar

from attrs import field, frozen

from pipec.errors import ScheduleError
from pipec.rules import Corrected, Live, Rule
from pipec.schedules.base import Order, Problem
from pipec.schedules.slots import by_slot, slots_of, with_segments


def _segments(value: int | None) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ScheduleError(f"segments must be a whole number of chunks, at least 1, got {value!r}")
    return value


@frozen
class PipeMare:
    """No flush and one weight version; backwards read the newest weights, corrected by their mean change.

    ``inflight``: "full", the paper's 2(P - i) + 1 microbatches on device i, or "1f1b", P - i + 1.
    ``correction``: the decay D of the mean change, "optimal", or None for no correction.
    ``keep_corrected``: the corrected weights are made once per update, at the price of one more copy of the weights,
    and not at every backward; the numbers are the same.
    ``segments``: recompute in segments of so many chunks, of which only the first keeps its input; the fewest
    activations are held near the square root of their number.
    """

    bubble: ClassVar[str] = "0 per period"
    peak: ClassVar[str] = "2(P-s)-1 on device s"
    source: ClassVar[str] = "arXiv 1910.05124"
    asynchronous: ClassVar[bool] = True

    inflight: str = "full"
    correction: float | str | None = 0.135
    segments: int | None = field(default=None, converter=_segments)
    keep_corrected: bool = False
    name: str = "pipemare"
    placement: str = "linear"

    @property
    def weights(self) -> Rule:
        return Live() if self.correction is None else Corrected(self.correction, self.keep_corrected)

    def order(self, problem: Problem) -> Order:
        slots = slots_of(self.inflight, len(problem.chunks))
        return by_slot(problem, slots if self.segments is None else with_segments(slots, self.segments))

    def segment_starts(self, problem: Problem) -> range:
        return range(0, len(problem.chunks), self.segments or 1)
