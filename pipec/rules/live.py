"""Live weights: every task reads the newest; nothing is kept, nothing corrected."""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from pipec.rules.base import Counts, Reads, Rule


@frozen
class Live(Rule):
    """Forward and backward read the newest weights. ``every``: backwards per update, None for a whole minibatch."""

    name: ClassVar[str] = "live"
    every: int | None = None

    def versions(self, reads: Reads) -> Counts:
        return reads.newest
