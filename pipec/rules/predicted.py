"""Weight prediction (SpecTrain, arXiv 1809.02839; PipeOptim, arXiv 2312.00839)."""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from pipec.rules.base import Counts, Reads, Rule


@frozen
class Predicted(Rule):
    """A forward reads the newest weights moved on by the optimizer's own step times the updates until its backward."""

    name: ClassVar[str] = "predicted"
    buffers: ClassVar[int] = 1  # the predicted weights, while a forward runs

    def versions(self, reads: Reads) -> Counts:
        return reads.newest
