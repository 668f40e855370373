"""What a plan keeps besides its values: activation slots, weight versions, and memory for weights and optimizer.

Counts are taken from the tasks in the order of their lanes, not from formulas.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import frozen

from pipec.costs import Costs
from pipec.ir import BACKWARDS, Buffer, Kind, Lane, Plan
from pipec.rules import rule_of
from pipec.segments import first_stages

Ints = npt.NDArray[np.int64]


def activation_slots(plan: Plan) -> list[int]:
    """Per stage the microbatches for which it holds activations at most, kept inputs of recompute included.

    Without recompute a stage holds one from its forward to its backward. With recompute it holds what its RECOMPUTE
    made until the backward, and besides, from the forward on, its input, except inside a segment, where only the first
    stage keeps one (PipeMare, arXiv 1910.05124: P^2 in all, or about P^2/S + PS in segments of S).
    """
    firsts = first_stages(plan.recompute)
    made = np.zeros(len(plan.graph.stages), np.int64)
    for stage, rows in _rows_of_stages(plan):
        kind = plan.table.kind[rows]
        anew = bool((kind == Kind.RECOMPUTE).any())
        made[stage] = _most_open(plan, rows, Kind.RECOMPUTE if anew else Kind.FORWARD)
        if anew and (not firsts or stage in firsts):
            made[stage] += _most_open(plan, rows, Kind.FORWARD)
    return [int(count) for count in made]


def _rows_of_stages(plan: Plan) -> list[tuple[int, Any]]:
    """The tasks of each stage that has backwards, in the order of its lane."""
    made = []
    for lanes in plan.lanes:
        ids = lanes[Lane.COMPUTE]
        stages = plan.table.stage[ids]
        for stage in np.unique(stages[np.isin(plan.table.kind[ids], BACKWARDS)]).tolist():
            made.append((stage, ids[stages == stage]))
    return made


def _most_open(plan: Plan, rows: Any, opens: Kind) -> int:
    """The most microbatches begun by a task of kind ``opens`` whose backward has not ended."""
    kind = plan.table.kind[rows]
    ends = np.isin(kind, (Kind.BACKWARD, Kind.BACKWARD_WEIGHT))
    return int(np.cumsum((kind == opens).astype(np.int64) - ends).max(initial=0))


def versions_kept(plan: Plan) -> list[int]:
    """Per stage the weight versions that exist at once at most: the newest and the copies that are still read."""
    made = np.ones(len(plan.graph.stages), np.int64)
    buffers = plan.buffers
    for stage in np.unique(buffers.ref[buffers.kind == Buffer.WEIGHT]).tolist():
        own = np.flatnonzero((buffers.kind == Buffer.WEIGHT) & (buffers.ref == stage))
        order = np.concatenate([buffers.writer[own] * 2 + 1, buffers.free[own] * 2])  # at its end, at its start
        change = np.concatenate([np.ones(len(own), np.int64), -np.ones(len(own), np.int64)])
        made[stage] = 1 + np.cumsum(change[np.argsort(order)]).max()
    return [int(count) for count in made]


@frozen
class WeightMemory:
    """Bytes for the weights of one device: the newest, their gradients, the optimizer's state, stashed versions, and
    what the weight rule keeps of its own (PipeMare's mean changes, say)."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    stash: int = 0
    rule: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.stash + self.rule


def weight_memory(plan: Plan, costs: Costs) -> list[WeightMemory] | None:
    """Per device the memory for weights, None when a stage's ``weight_bytes`` are unknown.

    Gradients take as much as the weights, the optimizer ``costs.optimizer`` times as much, for stages with backwards.
    """
    sizes = [costs.weight_bytes(stage.name) for stage in plan.graph.stages]
    if any(size is None for size in sizes):
        return None
    rule, kept = rule_of(plan), versions_kept(plan)
    columns = np.zeros((plan.devices, 5))
    for stage, size in enumerate(sizes):
        trained = plan.graph.stages[stage].backward and plan.training
        extra = 0 if rule is None or not trained else rule.buffers
        columns[plan.stage_device(stage)] += (size or 0) * np.asarray(
            [1, trained, trained * costs.optimizer, kept[stage] - 1, extra]
        )
    return [WeightMemory(*(int(part) for part in row)) for row in columns]
