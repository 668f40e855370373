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

    A step is called after the minibatch that it feeds, counted from 0 as ``run.step()`` does. A device ends a step when
    it has run all its tasks of it, so the borders lean as the pipeline fills.
    """
    plan = timeline.plan
    found = periods(plan)
    ends = {device: _ends(timeline, found.step, device, plan.minibatches) for device in lane}
    first = min(lane, key=lane.__getitem__)
    for step in range(max(found.steady - 1, 0), plan.minibatches):
        at = {device: x(float(ends[device][step])) for device in lane}
        points = [(at[device], y + down) for device, y in lane.items() for down in (-3.0, height + 3.0)]
        if any(begin < ends[device][step] < end for device in lane):
            yield Line(tuple(points), STEP, 1.4, id=f"{prefix}step-{step}", css="step",
                       tooltip=(f"end of the step of minibatch {step}",))
    last = [0.0, *ends[first][max(found.steady - 1, 0) :].tolist()]
    last = last if found.steady else [0.0, *ends[first].tolist()]
    names = [*([_prologue(found.steady)] if found.steady else []),
             *(_step(k, k == found.steady) for k in range(found.steady, plan.minibatches)),
             ("epilogue, the flush", "epilogue")]
    for forms, left, right in zip(names, last, [*last[1:], timeline.makespan], strict=False):
        room = x(min(right, end)) - x(max(left, begin))
        fits = [text for text in forms if text_width(text, 9) + 6 < room]
        if right > left and fits:
            middle = (x(max(left, begin)) + x(min(right, end))) / 2
            yield Text(middle, lane[first] - 9, fits[0], 9, "c", ink=STEP, css="step")


def _prologue(steady: int) -> tuple[str, ...]:
    """Names of what comes before the steady steps, the longest first."""
    fed = "minibatch 0" if steady == 1 else f"minibatches 0 to {steady - 1}"
    return f"prologue, steps of {fed}" if steady > 1 else f"prologue, step of {fed}", f"prologue, {fed}", "prologue"


def _step(number: int, steady: bool) -> tuple[str, ...]:
    """Names of a steady step, the longest first."""
    name = f"step of minibatch {number}"
    return (*([f"{name} (steady)"] if steady else []), name, f"minibatch {number}", f"step {number}")


def _ends(timeline: Timeline, step: np.ndarray[tuple[int], np.dtype[np.int64]], device: int, count: int) -> np.ndarray[
    tuple[int], np.dtype[np.float64]
]:
    """When the device has run each step, shape (count,)."""
    ids = timeline.plan.lanes[device][Lane.COMPUTE]
    made = np.zeros(count + 1)
    np.maximum.at(made, step[ids], timeline.end[ids])
    return np.maximum.accumulate(made)[:count]
