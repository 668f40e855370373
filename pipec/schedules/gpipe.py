"""GPipe (arXiv 1811.06965): all forwards, then all backwards.

With P equal stages and M microbatches the makespan is (M + P - 1)(F + B + W); a device holds M activations.
"""

from __future__ import annotations

from attrs import frozen

from pipec.schedules.base import B, F, Op, Order, Problem, merge


@frozen
class GPipe:
    """Forwards of all microbatches, then backwards in the same order, so that gradients add up in order."""

    name: str = "gpipe"
    placement: str = "linear"

    def order(self, problem: Problem) -> Order:
        microbatches = range(problem.microbatches)
        sequences: list[list[Op]] = [
            [F(c, m) for m in microbatches] + [B(c, m) for m in microbatches] for c in range(len(problem.chunks))
        ]
        if len(problem.chunks) == problem.devices:
            return [[op for c in problem.on(d) for op in sequences[c]] for d in range(problem.devices)]
        return merge(problem, sequences)
