"""1F1B (PipeDream-flush, arXiv 2006.09503 section 2.2): a backward as soon as one can run.

The same bubble as GPipe; chunk c of P holds at most min(M, P - c) activations instead of M.
"""

from __future__ import annotations

from attrs import frozen

from pipec.schedules.base import B, F, Op, Order, Problem, merge


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
    """Each chunk warms up with as many forwards as there are chunks from it to the end."""

    name: str = "1f1b"
    placement: str = "linear"

    def order(self, problem: Problem) -> Order:
        count = len(problem.chunks)
        sequences = [one_f_one_b(c, count - c, problem.microbatches) for c in range(count)]
        if count == problem.devices:
            return [[op for c in problem.on(d) for op in sequences[c]] for d in range(problem.devices)]
        return merge(problem, sequences)
