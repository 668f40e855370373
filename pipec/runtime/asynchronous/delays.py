"""Random delays of forwards, to study what staleness does: for the one-thread replay."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from attrs import field, frozen

from pipec.errors import RunError
from pipec.runtime.randomness import Position, Purpose, task_seed


def _positive(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise RunError(f"TruncatedExponential: mean and max are positive numbers of updates, got {value!r}")
    return float(value)


@frozen
class TruncatedExponential:
    """Delays with the density exp(-x/mean) / (mean (1 - exp(-max/mean))) on [0, max], in updates.

    Each FORWARD reads weights that are a whole number of updates, the delay rounded, older than its plan says, or the
    oldest there are. Their mean is ``mean - max/(exp(max/mean) - 1)`` before rounding. Draws depend on the
    runner's seed, the minibatch, the microbatch and the stage only. Learning rates by staleness (T1) and discrepancy
    correction (T2) count on :attr:`average` updates more than the plan's.
    """

    mean: float = field(converter=_positive)
    max: float = field(converter=_positive)

    @property
    def expected(self) -> float:
        """The mean of the truncated distribution."""
        ratio = self.max / self.mean
        return self.mean + self.max * math.exp(-ratio) / math.expm1(-ratio)

    @property
    def longest(self) -> int:
        """The largest delay in whole updates."""
        return math.floor(self.max + 0.5)

    @property
    def average(self) -> float:
        """The mean of the whole numbers that are drawn: how much older weights are than a plan says, on average."""
        ends = np.arange(self.longest) + 0.5  # a delay of k or more was drawn beyond k - 0.5
        return float((1.0 - np.expm1(-ends / self.mean) / math.expm1(-self.max / self.mean)).sum())

    def quantile(self, part: float) -> float:
        """The delay below which ``part`` of all lie."""
        return -self.mean * math.log1p(part * math.expm1(-self.max / self.mean))

    def draw(self, position: Position, stage: int, microbatch: int) -> int:
        """The delay of one FORWARD, in updates."""
        seed = task_seed(position.seed or 0, position.step, stage, microbatch, Purpose.UPDATE)
        uniform = torch.rand((), dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).item()
        return math.floor(self.quantile(uniform) + 0.5)
