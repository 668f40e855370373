"""Learning rates of asynchronous updates: those of the minibatch's own step, scaled by a stage's staleness (T1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import field, frozen
from torch import Tensor
from torch.optim import Optimizer

from pipec.errors import RunError

OPTIONS = ("lr", "momentum", "betas", "weight_decay")  # what schedulers change between steps


def _steps(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RunError(f"Rescheduling(steps=): K must be a whole number of updates, at least 1, got {value!r}")
    return value


@frozen
class Rescheduling:
    """PipeMare's learning-rate rescheduling, T1 (arXiv 1910.05124, section 3.1).

    Update k of stage i runs with lr / tau_i^p, p = 1 - min(k/K, 1), where lr is what the optimizer's groups say (and
    any scheduler made of it) and tau_i the staleness of the stage's forwards in updates. Never above lr.

    ``steps``: K. A quarter of the first phase of a step schedule, or five times the warm-up of a Transformer.
    """

    steps: int = field(converter=_steps)

    def factor(self, update: int, staleness: float) -> float:
        """What the learning rates of update ``update`` (from 0) are multiplied by."""
        power = 1.0 - min(update / self.steps, 1.0)
        return 1.0 if staleness <= 1.0 else float(staleness**-power)


def options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Per group what schedulers may change before its update runs."""
    return [
        {key: group[key].clone() if isinstance(group[key], Tensor) else group[key] for key in OPTIONS if key in group}
        for group in optimizer.param_groups
    ]


def advance(optimizer: Optimizer, options: Sequence[dict[str, Any]], factor: float) -> list[Any]:
    """Step ``optimizer`` with the given options, learning rates times ``factor``; what the script set stays set.

    Returns:
        The learning rate of every group.
    """
    before: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = []
    for group, own in zip(optimizer.param_groups, options, strict=False):
        put = own if factor == 1.0 or "lr" not in own else {**own, "lr": own["lr"] * factor}
        before.append((group, {key: group[key] for key in put}, put))
        group.update(put)
    rates = [group.get("lr") for group in optimizer.param_groups]
    try:
        optimizer.step()
    finally:
        for group, had, put in before:
            for key, value in put.items():
                if group[key] is value:  # else the optimizer itself changed it
                    group[key] = had[key]
    return rates
