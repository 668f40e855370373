"""Given delays: the model that papers reason about, as a plan that runs.

w(t+1) = w(t) - lr * grad f(w(t - tau_fwd), w(t - tau_bkwd)): how many updates old the weights of a stage's forwards
and backwards are is said, and does not follow from the order of tasks (PipeMare, arXiv 1910.05124, section 3).
Microbatches run one after another, so one device is enough.
"""

from __future__ import annotations

from typing import ClassVar

from attrs import field, frozen

from pipec.errors import PlanError, ScheduleError
from pipec.rules import Delayed as DelayedRule
from pipec.rules.delayed import delays
from pipec.schedules.base import B, F, Op, Order, Problem, U


@frozen
class Delayed:
    """One microbatch after another, on weights that are given numbers of updates old; for study.

    ``forward``, ``backward``: tau_fwd and tau_bkwd in updates, whole numbers, one for all stages or one per stage in
    the order of their declaration. The first updates of a run read the weights that it began with.
    ``correction``: the decay D of PipeMare's discrepancy correction, "optimal", or None for no correction.

    Raises:
        ScheduleError: negative delays, more of them backward than forward, or not as many as there are stages.
    """

    bubble: ClassVar[str] = "(P-1)/P per period"
    peak: ClassVar[str] = "1"
    source: ClassVar[str] = "arXiv 1910.05124"
    asynchronous: ClassVar[bool] = True

    forward: tuple[int, ...] = field(converter=delays)
    backward: tuple[int, ...] = field(default=0, converter=delays)
    correction: float | str | None = None
    name: str = "delayed"
    placement: str = "linear"

    def __attrs_post_init__(self) -> None:
        assert self.weights is not None  # it refuses what cannot be

    @property
    def weights(self) -> DelayedRule:
        return DelayedRule(self.forward, self.backward, self.correction)

    def order(self, problem: Problem) -> Order:
        try:
            self.weights.check(len(problem.stage_names))
        except PlanError as error:
            raise ScheduleError(f"{self.name}: {error}") from None
        lists: list[list[Op]] = []
        for device in range(problem.devices):
            chunks, row = problem.on(device), []
            for m in range(problem.microbatches):
                row += [F(c, m) for c in chunks] + [B(c, m) for c in reversed(chunks)]
                if (m + 1) % problem.minibatch == 0:
                    row += [U(c, m // problem.minibatch) for c in chunks]
            lists.append(row)
        return lists
