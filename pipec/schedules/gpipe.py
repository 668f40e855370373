"""GPipe (arXiv 1811.06965): all forwards, then all backwards.

With P equal stages, M microbatches and hand-overs of c the makespan is (M + P - 1)(F + B + W) + 2(P - 1)c,
for any P and M; a device holds M activations.
"""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from pipec.schedules.base import B, F, Op, Order, Problem
from pipec.schedules.merge import per_device


@frozen
class GPipe:
    """All forwards, then all backwards in the same order."""

    bubble: ClassVar[str] = "(P-1)(F+B+W) + 2(P-1)c"
    peak: ClassVar[str] = "M"
    source: ClassVar[str] = "arXiv 1811.06965"

    name: str = "gpipe"
    placement: str = "linear"

    def order(self, problem: Problem) -> Order:
        microbatches = range(problem.microbatches)
        sequences: list[list[Op]] = [
            [F(c, m) for m in microbatches] + [B(c, m) for m in microbatches]
            for c in range(len(problem.chunks))
        ]
        return per_device(problem, sequences)
