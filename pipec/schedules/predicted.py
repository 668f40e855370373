"""Weight prediction: forwards run on the weights that their backward is expected to read.

SpecTrain (arXiv 1809.02839) predicts them with SGD's momentum, PipeOptim (arXiv 2312.00839) with the step of any
optimizer: newest weights, moved on by the step times the number of updates until the backward.
"""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from pipec.rules import Predicted as PredictedRule
from pipec.rules import Rule
from pipec.schedules.base import Order, Problem
from pipec.schedules.slots import by_slot, slots_of


@frozen
class Predicted:
    """1f1b without flush; forwards read the newest weights, extrapolated by the optimizer's own step.

    ``inflight``: "1f1b", P - i + 1 microbatches on device i, or "full", 2(P - i) + 1.
    """

    bubble: ClassVar[str] = "0 per period"
    peak: ClassVar[str] = "P-s on device s"
    source: ClassVar[str] = "arXiv 2312.00839"
    asynchronous: ClassVar[bool] = True

    inflight: str = "1f1b"
    name: str = "predicted"
    placement: str = "linear"

    @property
    def weights(self) -> Rule:
        return PredictedRule()

    def order(self, problem: Problem) -> Order:
        return by_slot(problem, slots_of(self.inflight, len(problem.chunks)))
