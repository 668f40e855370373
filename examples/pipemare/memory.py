"""Part (a): utilisation, and memory for weights and optimizer, of the paper's pipelines, read off compiled plans."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import pipec
from pipec.ir import Buffer

# What SGD with momentum and AdamW hold of every weight without any pipeline: weight, gradient, and one or two states.
HELD = {"momentum": 3, "adamw": 4}
PIPELINES = {"ResNet": (107, 8, "momentum"), "Transformer": (93, 19, "adamw")}
SCHEDULES = {
    "GPipe": "gpipe",
    "PipeDream": pipec.PipeDream(),
    "PipeDream-2BW": pipec.PipeDream2BW(),
    "PipeMare": pipec.PipeMare(),
}


def versions(plan: pipec.Plan, timeline: pipec.Timeline) -> list[int]:
    """Per device the most weight versions alive at once, the newest included."""
    buffers, made = plan.buffers, []
    for device in range(plan.devices):
        own = np.flatnonzero((buffers.kind == Buffer.WEIGHT) & (buffers.device == device))
        begin, end = timeline.start[buffers.writer[own]], timeline.end[buffers.free[own]]
        alive = [int(((begin <= at) & (at < end)).sum()) for at in begin]
        made.append(1 + max(alive, default=0))
    return made


def row(stages: int, microbatches: int, schedule: Any, held: int) -> dict[str, float]:
    """Figures of one pipeline of equal stages.

    Returns:
        ``utilisation``: useful time by all time, of the steady period where there is one. ``memory``: weights,
        gradients, optimizer states, delta and stash over all devices, by that without a pipeline. ``versions``: the
        most on one device. ``activations``: microbatches held on all devices together.
    """
    began = time.perf_counter()
    plan = pipec.compile(pipec.chain(stages), stages, microbatches, schedule=schedule, update="stage")
    timeline = plan.simulate()
    kept = versions(plan, timeline)
    delta = stages if plan.weights.startswith("corrected") else 0
    return {
        "utilisation": 1.0 - timeline.bubble,
        "memory": (held * stages + sum(kept) - stages + delta) / (held * stages),
        "versions": max(kept),
        "activations": sum(timeline.peak_share),
        "tasks": len(plan),
        "seconds": time.perf_counter() - began,
    }


def table() -> dict[str, dict[str, dict[str, Any]]]:
    """All rows by pipeline and schedule; 2BW with as many microbatches as it needs."""
    made: dict[str, dict[str, dict[str, Any]]] = {}
    for name, (stages, microbatches, optimizer) in PIPELINES.items():
        made[name] = {}
        for label, schedule in SCHEDULES.items():
            count = max(microbatches, stages) if label == "PipeDream-2BW" else microbatches
            made[name][label] = {"microbatches": count, **row(stages, count, schedule, HELD[optimizer])}
    return made
