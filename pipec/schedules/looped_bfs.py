"""Breadth-first on a looped placement (arXiv 2211.05953): all microbatches of a chunk before the next chunk.

With P devices of v chunks each the bubble is (P - 1)(F + B + W)/v + 2(P - 1)c when no chunk waits for the
loop to close: M f >= P (f + c), where f is the shorter of a chunk's forward and backward; at c = 0 that is
M >= P. A device holds M activations. What it buys for the memory: few, long runs of one chunk, so that a
chunk's weights can be gathered and its gradients reduced once per step.
"""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from pipec.schedules.base import B, F, Order, Problem


@frozen
class LoopedBFS:
    """All microbatches of one chunk, then those of the next.

    ``chunks``: per device; None takes as many as there are stages per device.
    """

    bubble: ClassVar[str] = "(P-1)(F+B+W)/v + 2(P-1)c"
    peak: ClassVar[str] = "M"
    source: ClassVar[str] = "arXiv 2211.05953"

    chunks: int | None = None
    name: str = "looped-bfs"
    placement: str = "looped"

    def order(self, problem: Problem) -> Order:
        """Serves any placement: the lists are parts of one order, forwards by chunk, backwards reversed."""
        microbatches = range(problem.microbatches)
        lists = []
        for device in range(problem.devices):
            own = problem.on(device)
            forwards = [F(c, m) for c in own for m in microbatches]
            lists.append(forwards + [B(c, m) for c in reversed(own) for m in microbatches])
        return lists
