"""Discrepancy correction (PipeMare, arXiv 1910.05124, technique T2)."""

from __future__ import annotations

from typing import ClassVar

from attrs import field, frozen

from pipec.errors import ScheduleError
from pipec.rules.base import Counts, Reads, Rule, number_of


def _decay(value: float | str) -> float | str:
    if value == "optimal":
        return "optimal"
    number = number_of(value)
    if not 0 < number < 1:
        raise ScheduleError(f"correction: the decay D lies between 0 and 1, or is 'optimal'; got {value!r}")
    return number


@frozen
class Corrected(Rule):
    """Forward and backward read the newest weights, the backward corrected by their mean change.

    u = w - (tau_fwd - tau_bkwd) * delta, where delta averages w(t+1) - w(t) with g = D^(1/(tau_fwd - tau_bkwd)).
    ``decay``: D, or "optimal" for g = 1 - 2/(tau_fwd - tau_bkwd + 1). ``kept``: u is made once per update and kept
    until the next, one more copy of the weights; otherwise every backward makes what it needs of it.
    """

    name: ClassVar[str] = "corrected"
    decay: float | str = field(default=0.135, converter=_decay)
    kept: bool = False

    @property
    def buffers(self) -> int:  # type: ignore[override]
        """delta, and u where it is kept."""
        return 2 if self.kept else 1

    def versions(self, reads: Reads) -> Counts:
        return reads.newest
