"""Weight stashing (PipeDream, arXiv 1806.03377, section 3.3)."""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from pipec.rules.base import Counts, Reads, Rule


@frozen
class Stash(Rule):
    """A backward reads the weights that its forward read, of which copies are kept.

    ``vertical_sync``: every stage reads, for a microbatch, the version that the first stage read.
    """

    name: ClassVar[str] = "stash"
    vertical_sync: bool = False

    def versions(self, reads: Reads) -> Counts:
        return reads.at_first if self.vertical_sync else reads.at_forward
