"""Double-buffered weights (PipeDream-2BW, arXiv 2006.09503, section 3.1)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from attrs import frozen

from pipec.rules.base import Counts, Reads, Rule


@frozen
class TwoBuffered(Rule):
    """All tasks of update k read version k - 1, on every stage: one update old, of two versions kept."""

    name: ClassVar[str] = "2bw"

    def versions(self, reads: Reads) -> Counts:
        return np.maximum(reads.update - 1, 0)
