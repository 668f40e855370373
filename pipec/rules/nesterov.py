"""Nesterov look-ahead for asynchronous pipelines (arXiv 2505.01099)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from attrs import field, frozen

from pipec.errors import ScheduleError
from pipec.ir import Kind
from pipec.rules.base import Counts, Reads, Rule, number_of


def _momentum(value: float | str) -> float:
    number = number_of(value)
    if not 0 <= number < 1:
        raise ScheduleError(f"nesterov: the momentum lies in [0, 1); got {value!r}")
    return number


@frozen
class Nesterov(Rule):
    """The update carries a look-ahead: d = g(w(t) - w(t-1)), w(t+1) = w(t) + d - lr(1-g) grad.

    ``stash``: backwards read the weights that their forwards read; otherwise the newest.
    """

    name: ClassVar[str] = "nesterov"
    buffers: ClassVar[int] = 1  # the last change of the weights
    momentum: float = field(default=0.99, converter=_momentum)
    stash: bool = False

    def versions(self, reads: Reads) -> Counts:
        if not self.stash:
            return reads.newest
        return np.where(reads.kind == Kind.FORWARD, reads.newest, reads.at_forward)
