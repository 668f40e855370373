"""Part (a): utilisation, and memory for weights and optimizer, of the paper's pipelines, read off compiled plans."""

from __future__ import annotations

from typing import Any

import pipec
from pipec.footprint import activation_slots

# Stages, microbatches, and states that the optimizer holds of every weight: one with momentum, two with AdamW.
PIPELINES = {"ResNet": (107, 8, 1), "Transformer": (93, 19, 2)}
SCHEDULES = {
    "GPipe": "gpipe",
    "PipeDream": pipec.PipeDream(),
    "PipeDream-2BW": pipec.PipeDream2BW(),
    "PipeMare": pipec.PipeMare(),
    "PipeMare, recompute": pipec.PipeMare(segments=10),
}


def row(stages: int, microbatches: int, schedule: Any, states: int) -> dict[str, float]:
    """Figures of one pipeline of equal stages.

    Returns:
        ``utilisation``: useful time by all time, of the steady period where there is one; recompute is not useful.
        ``memory``: weights, gradients, optimizer states, delta and stash of all devices, by weights, gradients and
        states alone. ``versions``: of weights, on the device with most. ``activations``: microbatches' worth
        on all devices together, inputs kept for recompute included.
    """
    costs = pipec.Costs(stages={f"s{number}": {"weight_bytes": 1000} for number in range(stages)}, optimizer=states)
    plan = pipec.compile(pipec.chain(stages), stages, microbatches, schedule, update="stage", costs=costs)
    timeline = plan.simulate()
    held = timeline.weight_memory
    assert held is not None
    return {
        "utilisation": 1.0 - timeline.bubble,
        "memory": sum(own.total for own in held) / (1000 * (2 + states) * stages),
        "versions": max(1 + own.stash // 1000 for own in held),
        "activations": sum(activation_slots(plan)),
    }


def table(quick: bool = False) -> dict[str, dict[str, dict[str, Any]]]:
    """All rows by pipeline and schedule; 2BW with as many microbatches as it needs. ``quick``: pipelines of a tenth."""
    made: dict[str, dict[str, dict[str, Any]]] = {}
    for name, (full, microbatches, states) in PIPELINES.items():
        made[name], stages = {}, full // 10 if quick else full
        for label, schedule in SCHEDULES.items():
            count = max(microbatches, stages) if label == "PipeDream-2BW" else microbatches
            made[name][label] = {"microbatches": count, **row(stages, count, schedule, states)}
    return made
