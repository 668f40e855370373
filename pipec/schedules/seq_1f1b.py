"""Seq1F1B: 1F1B over slices of sequences instead of whole microbatches (arXiv 2406.03488, section 3).

Every microbatch is cut into k slices along its sequence. Forwards run slice by slice, since a slice looks back at the
earlier ones (causal attention reads their keys and values); backwards from the last slice to the first, since their
gradients flow back the same way. So the first backward of a device has to wait for all k slices of a microbatch:
device s of P warms up with P - s - 1 + k slice forwards, then alternates.

The bubble is a k-th of 1F1B's, (P-1)(F+B+W)/k at c = 0, and at most (P-1+k)/k microbatches are held, for slices that
cost the same. With k = 1 it is 1F1B.
"""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from pipec.schedules.base import B, F, Op, Order, Problem
from pipec.schedules.merge import per_device


def slices_in_turn(chunk: int, warmup: int, microbatches: int, slices: int) -> list[Op]:
    """``warmup`` forwards, then one backward and one forward in turn; slices are counted through all microbatches.

    Slice k of microbatch m has the number m x slices + k; backwards run through a microbatch in reverse.
    """
    forwards = [F(chunk, unit) for unit in range(microbatches * slices)]
    backwards = [B(chunk, m * slices + k) for m in range(microbatches) for k in reversed(range(slices))]
    ops = forwards[:warmup]
    for number, backward in enumerate(backwards):
        ops += [backward, *forwards[warmup + number : warmup + number + 1]]
    return ops


@frozen
class SeqOneFOneB:
    """1f1b over slices of a sequence: a k-th of its bubble and about a k-th of its activations; 1f1b without slices."""

    bubble: ClassVar[str] = "(P-1)(F+B+W)/k at c=0"
    peak: ClassVar[str] = "(P-1+k)/k"
    source: ClassVar[str] = "arXiv 2406.03488"

    name: str = "seq-1f1b"
    placement: str = "linear"

    def order(self, problem: Problem) -> Order:
        count, slices = len(problem.chunks), problem.slices
        # Backwards count slices as forwards do, so that merging several chunks of a device needs no more than that.
        lists = per_device(problem, [
            slices_in_turn(c, count - c - 1 + slices, problem.microbatches, slices) for c in range(count)
        ])
        if slices == 1:
            return lists
        return [[(kind, chunk, *divmod(unit, slices)) for kind, chunk, unit in row] for row in lists]
