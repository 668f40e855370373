"""PipeDream-2BW (arXiv 2006.09503, section 3.1): 1F1B without a flush on two weight versions.

All tasks of minibatch k read version k - 1 on every device, one update older than the newest that they could: so
w(t+1) = w(t) - lr grad(w(t-1)). Two versions are enough when a minibatch has at least as many microbatches as the
pipeline has stages.
"""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from pipec.errors import ScheduleError
from pipec.rules import Rule, TwoBuffered
from pipec.schedules.base import Order, Problem
from pipec.schedules.slots import by_slot, one_f_one_b_slots


@frozen
class PipeDream2BW:
    """1f1b without flush on two weight versions, each one update old everywhere."""

    bubble: ClassVar[str] = "0 per period"
    peak: ClassVar[str] = "P-s on device s"
    source: ClassVar[str] = "arXiv 2006.09503"
    asynchronous: ClassVar[bool] = True

    name: str = "pipedream-2bw"
    placement: str = "linear"

    @property
    def weights(self) -> Rule:
        return TwoBuffered()

    def order(self, problem: Problem) -> Order:
        chunks = len(problem.chunks)
        if problem.minibatch < chunks:
            raise ScheduleError(
                f"{self.name} keeps two weight versions, which takes at least as many microbatches per minibatch as "
                f"there are chunks of stages: {chunks} chunks, but microbatches={problem.minibatch}; compile with "
                f"microbatches={chunks} or more, or choose pipedream"
            )
        return by_slot(problem, one_f_one_b_slots(chunks))
