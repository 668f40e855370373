"""The measured timeline of a step: a Timeline like the simulated one, from the clock instead of costs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import evolve

from pipec.costs import Costs
from pipec.excerpt import Excerpt
from pipec.ir import Kind, Plan
from pipec.timeline import Timeline


def measured(plan: Plan, begun: Sequence[int], ended: Sequence[int], excerpt: Excerpt | None = None) -> Timeline:
    """Start and end of every task in milliseconds from the first one's start; given in nanoseconds.

    A task's cause is whatever ended last before it began among the task before it on its lane and what it waited
    for. ``excerpt``: what the plan is a part of, where it is one step of an asynchronous one.
    """
    starts, ends = np.asarray(begun, np.int64), np.asarray(ended, np.int64)
    zero = starts[starts > 0].min(initial=np.iinfo(np.int64).max)
    start, end = np.maximum(starts - zero, 0) / 1e6, np.maximum(ends - zero, 0) / 1e6
    before = np.full(len(plan.table), -1, np.int32)
    for lanes in plan.lanes:
        for ids in lanes[:1]:
            before[ids[1:]] = ids[:-1]
    cause = np.full(len(plan.table), -1, np.int32)
    for task in range(len(plan.table)):
        candidates = [int(w) for w in plan.waits.of(task)] + ([int(before[task])] if before[task] >= 0 else [])
        if candidates:
            cause[task] = max(candidates, key=lambda i: end[i])
    costs = evolve(plan.costs or Costs(), unit="ms")
    copies = plan.table.kind == Kind.COPY
    end = np.where(copies, np.maximum(end, start), end)
    return Timeline(plan, costs, start, end, cause, True, excerpt)
