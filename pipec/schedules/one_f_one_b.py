"""1F1B and eager 1F1B: a backward as soon as one can run, which frees its activations early.

1F1B (PipeDream-flush, arXiv 2006.09503): device s of P warms up with P - s forwards, which is as many as
must be under way before its first backward comes back. The same bubble as GPipe, (P - 1)(F + B + W), when
hand-overs cost nothing; at most min(M, P - s) activations instead of M.

Eager 1F1B (arXiv 2211.05322): 2(P - s) - 1 warm-up forwards. The forwards in excess hide the hand-overs:
bubble (P - 1)(F + B + W) + 2(P - 1)c as long as c <= (F + B + W)/2, for min(M, 2(P - s) - 1) activations.
"""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from pipec.schedules.base import B, F, Op, Order, Problem
from pipec.schedules.merge import per_device


def one_f_one_b(chunk: int, warmup: int, microbatches: int) -> list[Op]:
    """``warmup`` forwards, then one backward and one forward in turn, then the remaining backwards."""
    warmup = min(warmup, microbatches)
    ops = [F(chunk, m) for m in range(warmup)]
    for m in range(microbatches):
        ops.append(B(chunk, m))
        if m + warmup < microbatches:
            ops.append(F(chunk, m + warmup))
    return ops


@frozen
class OneFOneB:
    """A backward as soon as one can run."""

    bubble: ClassVar[str] = "(P-1)(F+B+W) at c=0"
    peak: ClassVar[str] = "P-s on device s"
    source: ClassVar[str] = "arXiv 2006.09503"

    name: str = "1f1b"
    placement: str = "linear"

    def order(self, problem: Problem) -> Order:
        count = len(problem.chunks)
        return per_device(problem, [one_f_one_b(c, count - c, problem.microbatches) for c in range(count)])


@frozen
class EagerOneFOneB:
    """1f1b with more forwards ahead, which hide the hand-overs."""

    bubble: ClassVar[str] = "(P-1)(F+B+W) + 2(P-1)c"
    peak: ClassVar[str] = "2(P-s)-1 on device s"
    source: ClassVar[str] = "arXiv 2211.05322"

    name: str = "eager-1f1b"
    placement: str = "linear"

    def order(self, problem: Problem) -> Order:
        count = len(problem.chunks)
        return per_device(
            problem, [one_f_one_b(c, 2 * (count - c) - 1, problem.microbatches) for c in range(count)]
        )
