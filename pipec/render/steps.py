"""Where the steps of an asynchronous plan end: a border down the devices, and what each part is called."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from pipec.ir import Lane
from pipec.periods import periods
from pipec.render.dot import Item, Line, Text, text_width
from pipec.render.palette import STEP
from pipec.timeline import Timeline

To = Callable[[float], float]
ROOM = 13.0  # points above the first lane for the names


def step_borders(
    timeline: Timeline, x: To, begin: float, end: float, lane: dict[int, float], height: float, prefix: str
) -> Iterator[Item]:
    """A staircase at the end of the prologue and of each steady step, the names of the parts above it.

    Steps are counted from 1. A device ends a step when it has run all its tasks of it, so the borders lean as the
    pipeline fills.
    """
    plan = timeline.plan
    found = periods(plan)
    ends = {device: _ends(timeline, found.step, device, plan.minibatches) for device in lane}
    first = min(lane, key=lane.__getitem__)
    for step in range(max(found.steady - 1, 0), plan.minibatches):
        inside = {device: x(float(ends[device][step])) for device in lane if begin < ends[device][step] < end}
        points = [(at, lane[device] + down) for device, at in inside.items() for down in (-3.0, height + 3.0)]
        if points:
            yield Line(tuple(points), STEP, 1.4, id=f"{prefix}step-{step}", css="step",
                       tooltip=(f"end of step {step + 1}",))
    last = [0.0, *ends[first][max(found.steady - 1, 0) :].tolist()]
    last = last if found.steady else [0.0, *ends[first].tolist()]
    names = [*(["prologue"] if found.steady else []),
             *(f"step {k + 1}" + " (steady)" * (k == found.steady) for k in range(found.steady, plan.minibatches)),
             "epilogue"]
    for name, left, right in zip(names, last, [*last[1:], timeline.makespan], strict=False):
        room = x(min(right, end)) - x(max(left, begin))
        if right > left and room > text_width(name.split(" (", maxsplit=1)[0], 9):
            text = name if room > text_width(name, 9) else name.split(" (", maxsplit=1)[0]
            middle = (x(max(left, begin)) + x(min(right, end))) / 2
            yield Text(middle, lane[first] - 9, text, 9, "c", ink=STEP, css="step")


def _ends(timeline: Timeline, step: np.ndarray[tuple[int], np.dtype[np.int64]], device: int, count: int) -> np.ndarray[
    tuple[int], np.dtype[np.float64]
]:
    """When the device has run each step, shape (count,)."""
    ids = timeline.plan.lanes[device][Lane.COMPUTE]
    made = np.zeros(count + 1)
    np.maximum.at(made, step[ids], timeline.end[ids])
    return np.maximum.accumulate(made)[:count]
