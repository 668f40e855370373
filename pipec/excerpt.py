"""One step, or the flush, of an asynchronous run: what its part of the plan cannot say of itself."""

from __future__ import annotations

from attrs import frozen

from pipec.columns import Column
from pipec.ir import Kind, Plan, Task


@frozen(eq=False)
class Excerpt:
    """What a measured part of an asynchronous plan is a part of.

    Attributes:
        plan: the whole plan.
        numbers: per minibatch that it lays out the run's own, counted by its steps from 0; -1 where none was fed.
        buffers: rows of the whole plan's buffers that the part has.
        flush: it is a flush and no step.
    """

    plan: Plan
    numbers: tuple[int, ...]
    buffers: Column
    flush: bool = False

    def item(self, task: Task) -> tuple[int, int]:
        """The run's (minibatch, microbatch) of a task, as ``result.finished`` counts them; of an UPDATE the last one
        that goes into it."""
        last = (task.microbatch + 1) * self.plan.update_every - 1 if task.kind is Kind.UPDATE else task.microbatch
        return self.numbers[last // self.plan.minibatch], last % self.plan.minibatch

    def label(self, task: Task) -> str:
        """``5.2``: microbatch 2 of minibatch 5; only the minibatch where it is not cut into microbatches."""
        minibatch, microbatch = self.item(task)
        return f"{minibatch}.{microbatch}" if self.plan.minibatch > 1 else str(minibatch)

    @property
    def widest(self) -> str:
        """The longest label."""
        newest = max(self.numbers)
        return f"{newest}.{self.plan.minibatch - 1}" if self.plan.minibatch > 1 else str(newest)

    @property
    def name(self) -> str:
        """``step of minibatch 5``, or of what followed it."""
        return f"{'flush after' if self.flush else 'step of'} minibatch {max(self.numbers)}"
