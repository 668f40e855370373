"""The task graph of a small plan: every compute task and what it needs, at fixed places.

A task stands in the row of its stage and in the column of the step in which it can run when each task takes
one step; so every edge leads to the right, and no layout program has to search.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from pipec.errors import RenderError
from pipec.ir import Kind, Lane, Plan
from pipec.passes.draft import Index, data_edges
from pipec.render.dot import Box, Item, Line, Text, printable, scene, shorten, text_width
from pipec.render.palette import INK, LANE, PALE, WORDS, ink_on, mix, shade
from pipec.render.picture import Picture
from pipec.segments import recomputed_values

MOST_TASKS = 600
WIDE, HIGH, STEP_X, STEP_Y, MARGIN, GAP = 36.0, 20.0, 50.0, 34.0, 14.0, 12.0
COMMAND = "paint with: neato -n2 -Tsvg this.dot -o picture.svg"
ACROSS, WITHIN = "#333333", "#9A9A9A"


def draw_tasks(plan: Plan, width: float | None = None, timeout: float = 60.0) -> Picture:
    """The dependency graph of a plan's compute tasks; arrows between devices are copies.

    Raises:
        RenderError: more tasks than can be read.
    """
    ids = np.sort(np.concatenate([lanes[Lane.COMPUTE] for lanes in plan.lanes]))
    if len(ids) > MOST_TASKS:
        fewer = max(1, plan.microbatches * MOST_TASKS // len(ids))
        raise RenderError(
            f"a graph of {len(ids):,} tasks cannot be read (at most {MOST_TASKS}); compile with "
            f"microbatches={fewer} for a picture, or draw the timeline"
        )
    needs = edges(plan)
    column = steps(plan, ids, needs)
    step = STEP_X if width is None else max((width - 2 * MARGIN) / (max(column.values(), default=0) + 1), WIDE + 4)
    names = [shorten(s.name, 24) for s in plan.graph.stages]
    left = MARGIN + max(text_width(n, 9) for n in names) + 34
    y = MARGIN + 12
    title = f"{shorten(plan.graph.name, 60)} · {shorten(plan.schedule)} · what every task needs"
    items: list[Item] = [Text(MARGIN, y, title, 14, bold=True, ink=INK, css="title")]
    y += 26
    top, right = y, left + (max(column.values(), default=0) + 1) * step
    rows: dict[int, float] = {}
    for device in range(plan.devices):
        stages = [s for chunk in plan.chunks if chunk.device == device for s in chunk.stages]
        high = len(stages) * STEP_Y + 8
        items.append(
            Box(
                MARGIN,
                y,
                right + 8 - MARGIN,
                high,
                mix(LANE, "#FFFFFF", 0.2),
                id=f"device-{device}",
                css="device",
            )
        )
        items.append(Text(MARGIN + 6, y + 9, f"device {device}", 8.5, ink=PALE, css="device"))
        for number, stage in enumerate(stages):
            rows[stage] = y + 6 + number * STEP_Y + STEP_Y / 2
            items.append(Text(left - 10, rows[stage], names[stage], 9, "r", css="stage"))
        y += high + GAP
    items += _edges(plan, needs, column, rows, left, step)
    items += _boxes(plan, ids, column, rows, left, step, top)
    legend = "arrows: " + ", ".join(["black a copy to another device", "grey within a device"])
    items.append(Text(MARGIN, y + 4, legend, 9, ink=PALE, css="legend"))
    size = (max(right + MARGIN + 8, text_width(title, 14) * 1.2 + 2 * MARGIN), y + 20)
    return Picture(scene(items, *size, printable(plan.graph.name), COMMAND), True, size, timeout)


def edges(plan: Plan) -> list[tuple[int, int]]:
    """(task, task it needs) over all compute tasks, ascending."""
    index = Index(plan.table, len(plan.graph.stages), plan.microbatches, plan.slices, plan.replicas)
    task, needs = data_edges(plan.graph, index, recomputed_values(plan.graph, plan.recompute))
    return sorted(set(zip(task.tolist(), needs.tolist(), strict=True)))


def steps(plan: Plan, ids: npt.NDArray[np.int32], needs: list[tuple[int, int]]) -> dict[int, int]:
    """Per task the step in which it runs when all take one step and each device one task at a time."""
    before: dict[int, list[int]] = {int(i): [] for i in ids}
    for task, need in needs:
        before[task].append(need)
    for lanes in plan.lanes:
        own = lanes[Lane.COMPUTE].tolist()
        for first, second in pairwise(own):
            before[second].append(first)
    column: dict[int, int] = {}
    for task in ids.tolist():  # ids are a topological order
        waits = [w for w in plan.waits.of(task).tolist() if w in column]
        column[task] = max((column[t] + 1 for t in [*before[task], *waits]), default=0)
    return column


def _boxes(
    plan: Plan,
    ids: npt.NDArray[np.int32],
    column: dict[int, int],
    rows: dict[int, float],
    left: float,
    step: float,
    top: float,
) -> Iterator[Item]:
    for index in ids.tolist():
        task = plan.table.task(index)
        fill = shade(task.kind, 0, 1)
        middle = rows.get(task.stage, top + STEP_Y / 2)
        text = str(task)
        size = next((s for s in (9.5, 8.0, 6.5) if text_width(text, s) <= WIDE - 3), 0.0)
        stage = plan.graph.stages[task.stage].name if task.stage >= 0 else "all stages"
        tip = [f"{text}: {WORDS[task.kind]} of {stage}"]
        if task.kind is not Kind.UPDATE:
            tip[0] += f", microbatch {task.item}"
        yield Box(
            left + column[index] * step,
            middle - HIGH / 2,
            WIDE,
            HIGH,
            fill,
            mix(fill, "#000000", 0.5),
            0.6,
            text if size else "",
            "",
            size,
            ink_on(fill),
            f"task-{text}",
            f"task {WORDS[task.kind].replace(', ', '-')}",
            tuple(tip),
        )


def _edges(
    plan: Plan,
    needs: list[tuple[int, int]],
    column: dict[int, int],
    rows: dict[int, float],
    left: float,
    step: float,
) -> Iterator[Item]:
    """Straight between rows, a low arc along one row so that it passes over the boxes between."""
    table = plan.table
    for task, need in needs:
        if int(table.stage[task]) < 0:
            continue
        x0, x1 = left + column[need] * step + WIDE, left + column[task] * step
        y0, y1 = rows[int(table.stage[need])], rows[int(table.stage[task])]
        across = table.device[task] != table.device[need]
        css = "needs copy" if across else "needs"
        ink = ACROSS if across else WITHIN
        name = f"needs-{table.task(need)}-{table.task(task)}"
        if y0 == y1 and column[task] - column[need] > 1:
            start, end = (x0 - WIDE / 2, y0 - HIGH / 2), (x1 + WIDE / 2, y1 - HIGH / 2)
            rise = min(6.0 + (x1 - x0) * 0.03, 20.0)
            points = (start, (start[0] + 12, y0 - HIGH / 2 - rise), (end[0] - 12, y0 - HIGH / 2 - rise), end)
            yield Line(points, ink, 0.7, False, True, True, name, css)
        else:
            down = HIGH / 2 if y1 > y0 else -HIGH / 2 if y1 < y0 else 0.0
            first = (x0 - WIDE / 2, y0 + down) if down else (x0, y0)
            last = (x1 + WIDE / 2, y1 - down) if down else (x1, y1)
            turn = (y0 + y1) / 2
            path = (first, (first[0], turn), (last[0], turn), last) if down else (first, last)
            yield Line(path, ink, 0.7, False, True, bool(down), name, css)
