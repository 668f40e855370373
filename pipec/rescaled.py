"""Costs of microbatches of another size: their times and bytes go with their rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import evolve

from pipec.costs import DURATIONS, Costs, StageCosts
from pipec.ir import Kind

FIXED = ("latency", "host_latency", "update")  # durations that do not depend on the size of a microbatch
SIZES = ("activation_bytes", "output_bytes", "weight_activation_bytes", "carry_bytes")


def at(costs: Costs, microbatches: int) -> Costs:
    """Costs of a plan that cuts a minibatch into so many microbatches; they stay as they are where they do not say of
    how many they are."""
    if costs.microbatches in (None, microbatches):
        return costs
    made = costs_of(costs, costs.microbatches / microbatches, 0.0, microbatches)
    assert made is not None
    return made


def costs_of(
    costs: Costs | None, factor: float, overhead: float = 0.0, microbatches: int | None = None
) -> Costs | None:
    """The costs of microbatches ``factor`` times as large, ``microbatches`` of which they then are; None, where nothing
    changes, for one unit per task."""
    if costs is None and factor == 1.0 and not overhead:
        return None

    given = costs or Costs()

    def longer(own: Costs | StageCosts, whole: float) -> dict[str, Any]:
        names = [name for name in DURATIONS if name not in FIXED and getattr(own, name, None) is not None]
        made = {name: getattr(own, name) * factor + overhead for name in names}
        if overhead and any(name.startswith("backward") for name in names):
            made["backward"] = whole * factor + overhead  # one task, where the halves are two
        return made

    def larger(sizes: Mapping[str, Any]) -> dict[str, Any]:
        return {name: round(size * factor) for name, size in sizes.items() if size is not None}

    stages = {
        name: evolve(own, **longer(own, given.duration(Kind.BACKWARD, name)),
                     **larger({key: getattr(own, key) for key in SIZES}))
        for name, own in given.stages.items()
    }
    default = evolve(given, stages={}).duration(Kind.BACKWARD, "")
    return evolve(given, stages=stages, values=larger(given.values), gradients=larger(given.gradients),
                  saved_values=larger(given.saved_values), microbatches=microbatches, **longer(given, default))
