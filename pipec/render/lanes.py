"""What stands on the lanes: task boxes with their numbers, and the boxes of copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from attrs import frozen

from pipec.ir import Kind, Lane, Task
from pipec.render.dot import Box, Item, Line, shorten, text_width
from pipec.render.palette import CRITICAL, HUES, INK, OTHER, WORDS, ink_on, mix, shade
from pipec.render.window import View
from pipec.timeline import Timeline

LANE_HEIGHT = 30.0
SIZES = (10.0, 9.0, 8.0, 7.0, 6.0)  # of the numbers in boxes
LEGIBLE = 7.0  # of a number that has a weight version under it, in smaller print
SLIVER = 2.0  # points: what a task without duration takes
TICK, OVER = 3.0, 3.5  # points: how wide an update without duration is, and how far it stands out over its lane
To = Callable[[float], float]


@frozen(eq=False)
class Tasks:
    """What boxes and arrows need to know of a timeline's tasks."""

    timeline: Timeline
    prefix: str
    critical: frozenset[int]
    path: tuple[int, ...]
    chunk_of: dict[int, int]  # stage -> number of its chunk on its device
    chunks: int
    kinds_shown: tuple[int, ...]
    versions: bool
    news: frozenset[int]  # tasks that read another weight version than the same kind of task of their stage before them
    critical_shown: bool
    others_shown: bool
    has_copies: bool
    has_skips: bool
    has_groups: bool

    @staticmethod
    def of(view: View, prefix: str, critical: bool) -> Tasks:
        timeline, plan = view.timeline, view.timeline.plan
        seen: dict[int, int] = {}
        chunk_of: dict[int, int] = {}
        for chunk in plan.chunks:
            number = seen.get(chunk.device, 0)
            seen[chunk.device] = number + 1
            chunk_of |= dict.fromkeys(chunk.stages, number)
        shown = np.concatenate(list(view.shown.values()) or [np.empty(0, np.int32)])
        kinds = tuple(int(k) for k in np.unique(plan.table.kind[shown]))
        path = tuple(timeline.critical_path) if critical else ()
        skips = [v for v in range(len(plan.graph.values)) if is_skip_value(timeline, v)]
        copies = plan.table.value[plan.table.kind == Kind.COPY]
        return Tasks(
            timeline,
            prefix,
            frozenset(path),
            path,
            chunk_of,
            max(seen.values(), default=1),
            kinds,
            timeline.excerpt is not None or bool((plan.table.version > 0).any()),
            _news(view),
            bool(np.isin(shown, path).any()),
            any(len(ids) for ids in view.others.values()),
            bool(len(copies)),
            bool(np.isin(copies, skips).any()),
            bool(plan.table.group[shown].any()),
        )

    def colour(self, task: Task) -> str:
        if task.kind is Kind.UPDATE:
            return shade(task.kind, 0, 1)
        return shade(task.kind, self.chunk_of.get(task.stage, 0), self.chunks)

    def item(self, task: Task) -> str:
        """The microbatch of a task; with its slice, the first one too, where microbatches are cut into slices; after
        its minibatch in a step of an asynchronous run."""
        if self.timeline.excerpt is not None:
            return self.timeline.excerpt.label(task)
        if self.timeline.plan.slices == 1 or task.kind in (Kind.UPDATE, Kind.REDUCE):
            return task.item
        return f"{task.microbatch}.{task.slice}"

    def of_run(self, task: Task) -> str:
        """Which microbatch of which minibatch a task is for, in words; of an UPDATE the minibatch."""
        minibatch, microbatch = self.timeline.item(task)
        one = task.kind is Kind.UPDATE or self.timeline.plan.minibatch == 1
        return f"minibatch {minibatch}" if one else f"microbatch {microbatch} of minibatch {minibatch}"

    def stage_name(self, task: Task) -> str:
        return "all stages" if task.stage < 0 else shorten(self.timeline.plan.graph.stages[task.stage].name)

    def tooltip(self, task: Task, index: int) -> tuple[str, ...]:
        """What a reader wants to know of one task, line by line."""
        timeline, plan = self.timeline, self.timeline.plan
        start, end = float(timeline.start[index]), float(timeline.end[index])
        unit = f" {timeline.costs.unit}" if timeline.costs.unit else ""
        what = f"{task}: {WORDS[task.kind]} of {self.stage_name(task)}"
        if timeline.excerpt is not None:
            what = f"{WORDS[task.kind]} of {self.stage_name(task)}, {self.of_run(task)} ({task} of the plan)"
        elif task.kind is not Kind.UPDATE:
            what += f", microbatch {self.item(task)}"
        rows = [what, f"{start:.6g} to {end:.6g}{unit} ({end - start:.4g})"]
        if self.versions:
            makes = f"replaces weight version {task.version} by {task.version + 1}"
            rows.append(makes if task.kind is Kind.UPDATE else f"reads weight version {task.version}")
        if task.group:
            others = np.flatnonzero(plan.table.group == task.group)
            rows.append("runs as one with " + ", ".join(str(plan.table.task(int(o))) for o in others if o != index))
        waits = [f"{plan.table.task(int(w))} (ends {timeline.end[int(w)]:.6g})" for w in plan.waits.of(index)[:4]]
        if waits:
            rows.append("waits for " + ", ".join(waits))
        return tuple(rows)


def _news(view: View) -> frozenset[int]:
    """Of each kind and stage the first task shown, and those that read another weight version than the one before."""
    found: list[int] = []
    table = view.timeline.plan.table
    for shown in view.shown.values():
        own = shown[np.lexsort((np.arange(len(shown)), table.kind[shown], table.stage[shown]))]
        same = [np.diff(getattr(table, name)[own], prepend=-2) == 0 for name in ("stage", "kind", "version")]
        found += own[~np.logical_and.reduce(same)].tolist()
    return frozenset(found)


def is_skip(timeline: Timeline, value: int, reader: int) -> bool:
    """True when the edge from a value to a reader was marked as a skip or does not lead to the next stage."""
    info = timeline.plan.graph.values[value]
    return reader in info.skips or reader != info.producer + 1


def is_skip_value(timeline: Timeline, value: int) -> bool:
    return any(is_skip(timeline, value, reader) for reader in timeline.plan.graph.values[value].readers)


def label_sizes(tasks: Tasks, view: View, scale: float) -> dict[int, float]:
    """Per kind the font size at which its widest number fits a box of usual width: numbers look alike."""
    timeline, table = tasks.timeline, tasks.timeline.plan.table
    shown = np.concatenate(list(view.shown.values()))
    made: dict[int, float] = {}
    for kind in tasks.kinds_shown:
        own = shown[table.kind[shown] == kind]
        spans = (timeline.end - timeline.start)[own]
        usual = float(np.median(spans)) * scale
        widest = str(int(table.microbatch[own].max())) + ".0" * bool((table.slice[own] > 0).any())
        widest = widest if timeline.excerpt is None else timeline.excerpt.widest
        fits = [size for size in SIZES if text_width(widest, size) <= usual - 2.5]
        made[kind] = max(fits, default=0.0)
    return made


def task_boxes(
    tasks: Tasks,
    view: View,
    x: To,
    scale: float,
    lane: dict[int, float],
    height: float,
) -> Iterator[Item]:
    """A box per task; those on the critical path last, so that no neighbour covers their outline, and at the very end
    updates that take no time, as ticks across the lane.

    Tasks that run as one are outlined together, see :func:`group_frames`.
    """
    sizes = label_sizes(tasks, view, scale)
    late: list[Item] = []
    ticks: list[Item] = []
    for device, top in lane.items():
        yield from _others(view, device, x, top, height)
        for index in view.shown[device].tolist():
            box = _task_box(tasks, index, x, top, height, sizes)
            if tasks.timeline.plan.table.kind[index] == Kind.UPDATE and box.width == TICK:
                ticks.append(box)
            elif index in tasks.critical:
                late.append(box)
            else:
                yield box
    yield from late
    yield from ticks


def group_frames(tasks: Tasks, view: View, x: To, lane: dict[int, float], height: float) -> Iterator[Line]:
    """A frame around the boxes of tasks that run as one, in the critical path's colour where one of them is on it."""
    timeline, numbers = tasks.timeline, tasks.timeline.plan.table.group
    for device, top in lane.items():
        ids = view.shown[device][numbers[view.shown[device]] > 0]
        for number in np.unique(numbers[ids]).tolist():
            own = ids[numbers[ids] == number]
            left, right = x(float(timeline.start[own].min())), x(float(timeline.end[own].max()))
            up, down = top - 2.0, top + height + 2.0
            corners = ((left, up), (right, up), (right, down), (left, down), (left, up))
            name = f"{tasks.prefix}group-{number}"
            if tasks.critical.isdisjoint(own.tolist()):
                yield Line(corners, INK, 1.1, id=name, css="group")
            else:
                yield Line(corners, CRITICAL, 1.8, id=name, css="group critical")


def _others(view: View, device: int, x: To, top: float, height: float) -> Iterator[Item]:
    """Tasks outside the window of microbatches, touching ones joined."""
    timeline = view.timeline
    runs: list[list[float]] = []
    for index in view.others[device].tolist():
        start, end = float(timeline.start[index]), float(timeline.end[index])
        if end <= start:
            continue
        if runs and start <= runs[-1][1] + 1e-9:
            runs[-1][1] = end
        else:
            runs.append([start, end])
    for start, end in runs:
        yield Box(x(start), top, x(end) - x(start), height, OTHER, css="others", tooltip=("other microbatches",))


def _task_box(
    tasks: Tasks,
    index: int,
    x: To,
    top: float,
    height: float,
    sizes: dict[int, float],
) -> Box:
    timeline = tasks.timeline
    task = timeline.plan.table.task(index)
    left = x(float(timeline.start[index]))
    width = x(float(timeline.end[index])) - left
    slim = timeline.end[index] <= timeline.start[index]
    if slim:
        width = SLIVER
    fill = tasks.colour(task)
    if slim and task.kind is Kind.UPDATE:
        left, top, width, height, fill = left - TICK / 2, top - OVER, TICK, height + 2 * OVER, HUES[task.kind]
    critical = index in tasks.critical
    framed = critical and not task.group
    label, small, size = _label(tasks, task, width, height, sizes[task.kind], index in tasks.news)
    css = f"task {WORDS[task.kind].replace(', ', '-')} device-{task.device}"
    css += f" chunk-{tasks.chunk_of.get(task.stage, 0)}"
    pen = (1.8 if width > 6 else 0.9) if framed else (0.5 if width > 4 else 0.25)
    return Box(
        left,
        top,
        width,
        height,
        fill,
        CRITICAL if framed else mix(fill, "#000000", 0.5),
        0.0 if slim else pen,
        label,
        small,
        size,
        ink_on(fill),
        f"{tasks.prefix}task-{task}",
        css + (" critical" if critical else ""),
        tasks.tooltip(task, index),
    )


def _label(
    tasks: Tasks, task: Task, width: float, height: float, usual: float, news: bool
) -> tuple[str, str, float]:
    """The microbatch, the weight version under it, and their size: the usual one or smaller, or nothing.

    Kinds whose boxes are too narrow for their numbers carry one only in boxes with ample room. A version that could
    hardly be read is left to the tasks where it changes.
    """
    if task.kind is Kind.UPDATE:
        return "", "", 0.0
    version, item = f"w{task.version}" if tasks.versions else "", tasks.item(task)
    sizes = [s for s in SIZES if s <= usual] if usual else [8.0]
    choices = [(version, size) for size in sizes if not version or news or size >= LEGIBLE]
    choices += [("", size) for size in sizes]
    for small, size in choices:
        wide = max(text_width(item, size), text_width(small, size * 0.7))
        if wide <= width - 2.5 and size * (2.1 if small else 1.2) <= height - 2:
            return item, small, size
    return "", "", 0.0


def copy_lane(tasks: Tasks, device: int, x: To, view: View, top: float, height: float) -> Iterator[Item]:
    """The boxes of a device's copies: sent on the upper lane, received on the lower one."""
    timeline, plan = tasks.timeline, tasks.timeline.plan
    for step, lane in enumerate((Lane.OUT, Lane.IN)):
        y = top + step * (height + 2)
        for index in plan.lanes[device][lane].tolist():
            start, end = float(timeline.start[index]), float(timeline.end[index])
            if start >= view.end or end < view.begin:
                continue
            task = plan.table.task(index)
            fill = mix(HUES[Kind.COPY], "#000000" if task.gradient else "#FFFFFF", 0.2)
            width = max(x(end) - x(start), SLIVER)
            critical = index in tasks.critical
            label = tasks.item(task) if text_width(tasks.item(task), 7) <= width - 2 else ""
            yield Box(
                x(start),
                y,
                width,
                height,
                fill,
                CRITICAL if critical else mix(fill, "#000000", 0.4),
                1.2 if critical else 0.25,
                label,
                "",
                7.0,
                ink_on(fill),
                f"{tasks.prefix}copy-{task}-{lane.name.lower()}",
                f"copy lane-{lane.name.lower()}" + (" critical" if critical else ""),
                copy_tooltip(tasks, task, index),
            )


def copy_tooltip(tasks: Tasks, task: Task, index: int) -> tuple[str, ...]:
    timeline = tasks.timeline
    value = shorten(timeline.plan.graph.values[task.value].name)
    what = f"gradient of {value}" if task.gradient else value
    return (
        f"{task}: copy of {what}, microbatch {tasks.item(task)}" if timeline.excerpt is None
        else f"copy of {what}, {tasks.of_run(task)} ({task} of the plan)",
        ("host memory" if task.host == "from" else f"device {task.device}") + " to "
        + ("host memory" if task.host == "to" else f"device {task.peer}"),
        f"{timeline.start[index]:.6g} to {timeline.end[index]:.6g}",
    )
