"""What a step of an asynchronous plan hands back: the microbatches that were finished in it."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from attrs import Factory, frozen
from torch import Tensor

from pipec.errors import RunError
from pipec.runtime.result import Result, counted_minibatches
from pipec.runtime.step import joined_output
from pipec.spec import Spec

FILLING = "the pipeline is still filling"
IDLE = "nothing was in flight"
SYNCHRONOUS = "the plan is synchronous, so every step finishes its own minibatch and nothing is left to flush"
CLIP = "clip per stage, in a hook of its optimizer: optimizer.register_step_pre_hook(clip), see docs/asynchronous.md"
EMPTY = {  # why a result is empty, and where the losses and outputs are
    FILLING: "look at result.finished first, or take the {what} of run.flush()",
    IDLE: "each {what} is in the result of the step or the flush that finished its minibatch",
    SYNCHRONOUS: "the {what} is in the result of step()",
}


@frozen(eq=False)
class AsynchronousResult(Result):
    """Losses and outputs of the microbatches whose last backward ended in a step, a flush or before it.

    The first steps fill the pipeline and finish none: ``losses`` and ``outputs`` are empty then.

    Attributes:
        losses: by name, scalars per minibatch's worth of microbatches: a mean stays a mean, whatever part of which
            minibatches was finished. Where that is one whole minibatch it is bit-equal to that minibatch's loss.
        outputs: by name, finished microbatches joined in their order.
        microbatches: how many a minibatch is cut into.
        finished: (minibatch, microbatch) of each, ascending; minibatches counted as the run's steps from 0.
        microbatch_losses: by name, one scalar per entry of ``finished``, as the stage computed it.
        empty: why nothing was finished, where ``finished`` is empty.
    """

    finished: tuple[tuple[int, int], ...] = ()
    microbatch_losses: dict[str, tuple[Any, ...]] = Factory(dict)
    empty: str = FILLING

    @property
    def loss(self) -> Tensor:
        """The sum of all losses.

        Raises:
            RunError: nothing was finished yet.
        """
        self._refuse_empty("loss")
        return Result.loss.__get__(self)  # type: ignore[no-any-return]

    @property
    def output(self) -> Any:
        """The only output, of the finished microbatches.

        Raises:
            RunError: nothing was finished yet, or there are none or several.
        """
        self._refuse_empty("output")
        return Result.output.__get__(self)

    def _refuse_empty(self, what: str) -> None:
        if not self.finished:
            found = EMPTY[self.empty].format(what=what)
            raise RunError(f"no {what} here, since nothing was finished: {self.empty}; {found}")

    def __repr__(self) -> str:
        if not self.finished:
            return f"Result(nothing finished: {self.empty})"
        told = counted_minibatches(self.minibatches)
        return f"{Result.__repr__(self)[:-1]}; {len(self.finished)} finished, of {told})"


@frozen(eq=False)
class Finished:
    """One finished microbatch.

    Attributes:
        weights: per loss the factor that makes a minibatch's loss of its microbatches'.
        share: the part of its minibatch that it is.
    """

    minibatch: int
    microbatch: int
    losses: list[Any]
    outputs: list[Any]
    weights: list[float]
    share: Fraction


def result_of(
    spec: Spec, microbatches: int, finished: Sequence[Finished], elsewhere: tuple[tuple[str, int], ...] = ()
) -> AsynchronousResult:
    """The result of the finished microbatches, in their order; ``elsewhere``: outputs that are in others' results."""
    if not finished:
        return AsynchronousResult({}, {}, microbatches, elsewhere=elsewhere)
    share = sum((item.share for item in finished), Fraction(0))
    losses = {}
    for index, loss in enumerate(spec.losses):
        total = None
        for item in finished:
            part = item.losses[index] if item.weights[index] == 1.0 else item.losses[index] * item.weights[index]
            total = part if total is None else total + part
        losses[loss.name] = total if share == 1 or total is None else total / float(share)
    outputs = {
        out.name: joined_output(out, [item.outputs[index] for item in finished])
        for index, out in enumerate(spec.outputs) if out.name not in dict(elsewhere)
    }
    each = {loss.name: tuple(item.losses[index] for item in finished) for index, loss in enumerate(spec.losses)}
    return AsynchronousResult(
        losses, outputs, microbatches, elsewhere=elsewhere, microbatch_losses=each,
        finished=tuple((item.minibatch, item.microbatch) for item in finished),
    )
