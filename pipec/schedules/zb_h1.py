"""ZB-H1 and ZB-H2, the two hand-made zero-bubble schedules (arXiv 2401.10241, section 2).

The backward of a device is cut in two: its input half I is what the device before waits for, its weight half W
nobody waits for, so it can run where the device would be idle. Both schedules are one list per chunk: a warm-up
of forwards, then I and F in turn, with each W held back until the activations reach the cap; the W that are left
close the list.

ZB-H1 warms up as 1F1B does and holds P activations on every device: bubble (P-1)(F+B-W) at c = 0.
ZB-H2 warms up with 2(P-s) - 1 forwards on device s and holds 2P - 1: every device is busy from its first task to
its last, so a device's span has a bubble of (P-1)(F+B-2W) only, which is zero when F, B and W are equal.

ZB-H1's form holds for M >= P and ZB-H2's for M >= 2P - 1, with F, B and W near each other. With another F : B : W,
unequal stages or hand-overs the lists stay right but fixed; ``zb-1p`` and ``zb-2p`` look at the costs.
"""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from pipec.schedules.base import F, I, Op, Order, Problem, W
from pipec.schedules.limits import share_limit
from pipec.schedules.merge import per_device


def delayed_weights(chunk: int, warmup: int, cap: int, microbatches: int) -> list[Op]:
    """``warmup`` forwards, then I and F in turn, each W as late as ``cap`` activations allow."""
    cap = min(cap, microbatches)  # with fewer microbatches than that no W has anything to wait for
    warmup = min(warmup, cap)
    ops = [F(chunk, m) for m in range(warmup)]
    late = cap - warmup
    for m in range(microbatches):
        ops.append(I(chunk, m))
        if m >= late:
            ops.append(W(chunk, m - late))
        if m + warmup < microbatches:
            ops.append(F(chunk, m + warmup))
    ops += [W(chunk, m) for m in range(max(0, microbatches - late), microbatches)]
    return ops


@frozen
class ZBH1:
    """1f1b with split backwards whose weight halves fill the bubble, in 1f1b's memory.

    ``problem.memory_limit`` in activations lowers the cap of P.
    """

    bubble: ClassVar[str] = "(P-1)(F+B-W) at c=0"
    peak: ClassVar[str] = "P"
    source: ClassVar[str] = "arXiv 2401.10241"
    split: ClassVar[bool] = True

    name: str = "zb-h1"
    placement: str = "linear"

    def order(self, problem: Problem) -> Order:
        count = len(problem.chunks)
        cap = int(share_limit(problem, count))
        return per_device(
            problem, [delayed_weights(c, count - c, cap, problem.microbatches) for c in range(count)]
        )


@frozen
class ZBH2:
    """More forwards ahead than zb-h1, so that no device ever waits between its first and last task.

    ``problem.memory_limit`` in activations lowers the cap of 2P - 1.
    """

    bubble: ClassVar[str] = "span (P-1)(F+B-2W) at c=0"
    peak: ClassVar[str] = "2P-1"
    source: ClassVar[str] = "arXiv 2401.10241"
    split: ClassVar[bool] = True

    name: str = "zb-h2"
    placement: str = "linear"

    def order(self, problem: Problem) -> Order:
        count = len(problem.chunks)
        cap = int(share_limit(problem, 2 * count - 1))
        return per_device(
            problem, [delayed_weights(c, 2 * (count - c) - 1, cap, problem.microbatches) for c in range(count)]
        )
