"""Arrows over the lanes: copies from device to device, and where the critical path changes lanes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from pipec.errors import RenderError
from pipec.ir import FROM_HOST, TO_HOST, Kind, Plan
from pipec.render.dot import Item, Line, Point
from pipec.render.lanes import Tasks, To, copy_tooltip, is_skip
from pipec.render.palette import CRITICAL
from pipec.render.window import View

MOST_ARROWS = 3_000


def readers_of_copies(plan: Plan) -> dict[int, int]:
    """Per COPY the first task on the receiving device that waits for it."""
    task = np.repeat(np.arange(len(plan.table)), np.diff(plan.waits.start))
    needed = plan.waits.ids
    good = (plan.table.kind[needed] == Kind.COPY) & (plan.table.peer[needed] == plan.table.device[task])
    good &= (plan.table.kind[task] != Kind.COPY) & (plan.table.gradient[needed] != TO_HOST)
    found: dict[int, int] = {}
    for copy, reader in zip(needed[good].tolist(), task[good].tolist(), strict=True):
        found[copy] = min(reader, found.get(copy, reader))
    return found


def sent_by(plan: Plan, copy: int) -> int:
    """The copy that took from its producer what ``copy`` brings: of one from host memory the one to it."""
    if plan.table.gradient[copy] != FROM_HOST:
        return copy
    return next((w for w in plan.waits.of(copy).tolist() if plan.table.gradient[w] == TO_HOST), copy)


def _ends(lane: dict[int, float], height: float, source: int, target: int) -> tuple[float, float]:
    """Where an arrow leaves one lane and meets another: at the edges that face each other, or along one lane."""
    if source == target:
        return lane[source], lane[target]
    down = lane[target] > lane[source]
    return lane[source] + (height if down else 0.0), lane[target] + (0.0 if down else height)


def _skip(tasks: Tasks, value: int, gradient: bool, device: int, peer: int) -> bool:
    plan = tasks.timeline.plan
    far = device if gradient else peer
    own = [r for r in plan.graph.values[value].readers if plan.stage_device(r) == far]
    return bool(own) and all(is_skip(tasks.timeline, value, r) for r in own)


def copy_arrows(tasks: Tasks, view: View, x: To, lane: dict[int, float], height: float) -> Iterator[Item]:
    """An arrow per copy, from where it was sent to the task that first needs it; skips are dashed.

    Raises:
        RenderError: more arrows than a reader could follow.
    """
    timeline, table = tasks.timeline, tasks.timeline.plan.table
    reader = readers_of_copies(timeline.plan)
    shown = frozenset(np.concatenate(list(view.shown.values())).tolist()) if view.shown else frozenset()
    found = [
        c
        for c, r in reader.items()
        if r in shown
        and int(table.device[c]) in lane
        and view.begin <= timeline.start[sent_by(timeline.plan, c)] <= view.end
        and int(table.peer[c]) in lane
    ]
    if len(found) > MOST_ARROWS:
        raise RenderError(
            f"copies=True: {len(found):,} arrows would cover the picture (at most {MOST_ARROWS:,}); draw "
            "fewer microbatches or devices, such as microbatches=range(0, 8), or use lanes=True"
        )
    after = dict(zip(tasks.path, tasks.path[1:], strict=False))
    dashed: dict[tuple[int, bool, int, int], bool] = {}
    for copy in sorted(found):
        task = table.task(copy)
        route = (task.value, task.gradient, task.device, task.peer)
        if route not in dashed:
            dashed[route] = _skip(tasks, *route)
        y0, y1 = _ends(lane, height, task.device, task.peer)
        points: tuple[Point, ...] = (
            (x(float(timeline.start[sent_by(timeline.plan, copy)])), y0),
            (x(float(timeline.start[reader[copy]])), y1),
        )
        on = after.get(copy) == reader[copy]
        yield Line(
            points,
            CRITICAL if on else "#5A5A5A",
            1.2 if on else 0.6,
            dashed[route],
            True,
            False,
            f"{tasks.prefix}arrow-{task}",
            "copy" + (" skip" if dashed[route] else "") + (" critical" if on else ""),
            (*copy_tooltip(tasks, task, copy), f"read by {table.task(reader[copy])}"),
        )


def critical_links(tasks: Tasks, view: View, x: To, lane: dict[int, float], height: float) -> Iterator[Item]:
    """Thin lines where the critical path goes from one device to another."""
    timeline, table = tasks.timeline, tasks.timeline.plan.table
    path = [t for t in tasks.path if table.kind[t] != Kind.COPY]
    for before, after in pairwise(path):
        source, target = int(table.device[before]), int(table.device[after])
        start, end = float(timeline.end[before]), float(timeline.start[after])
        if source == target or source not in lane or target not in lane or not view.begin <= start <= end <= view.end:
            continue
        y0, y1 = _ends(lane, height, source, target)
        yield Line(((x(start), y0), (x(end), y1)), CRITICAL, 1.2, css="critical link")
