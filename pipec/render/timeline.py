"""The timeline picture: per device its tasks over time, memory under the same axis, several runs stacked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from attrs import field, frozen

from pipec.errors import RenderError
from pipec.render.arrows import copy_arrows, critical_links
from pipec.render.dot import Box, Item, Line, Text, printable, scene, shorten, text_width
from pipec.render.headings import MARGIN, check_units, headline, name_of, summary, summary_left
from pipec.render.lanes import LANE_HEIGHT, Tasks, copy_lane, group_frames, task_boxes
from pipec.render.legend import legend_items
from pipec.render.memory import FILLED, Memory, choose_memory, steps, strip
from pipec.render.palette import AXIS, GRID, INK, LANE, LIMIT, PALE
from pipec.render.picture import Picture
from pipec.render.steps import ROOM, step_borders
from pipec.render.window import View, axis_width, fitted_width, steady_windows, view
from pipec.timeline import Timeline

LEFT, LIMIT_ROOM = 92.0, 62.0
COMMAND = "paint with: neato -n2 -Tsvg this.dot -o picture.svg"


@frozen
class Options:
    """How a timeline is drawn. See :func:`pipec.draw`."""

    copies: bool = False
    lanes: bool = False
    memory: Any = None
    memory_limit: Any = None
    critical: bool = True
    devices: Any = None
    microbatches: Any = None
    time: Any = None
    width: float | None = field(default=None)
    legend: bool = True
    timeout: float = 60.0

    @width.validator
    def _width(self, _: Any, value: Any) -> None:
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, (int, float)) or not 100 <= value <= 20_000
        ):
            raise RenderError(f"width={value!r}: expected points of the time axis, from 100 to 20000")


@frozen
class Axis:
    """Where time stands on the page."""

    begin: float
    end: float
    left: float
    scale: float

    def x(self, time: float) -> float:
        return self.left + (min(max(time, self.begin), self.end) - self.begin) * self.scale

    @property
    def right(self) -> float:
        return self.x(self.end)


@frozen(eq=False)
class Panel:
    """One timeline of the picture and where its lanes stand."""

    view: View
    tasks: Tasks
    memory: Memory | None
    title: str
    lane: dict[int, float]  # top of each device's compute lane
    strips: dict[int, float]  # top of each device's memory strip
    lane_height: float
    copy_height: float
    strip_height: float
    top: float
    bottom: float


def draw_timelines(timelines: Sequence[Timeline], titles: Sequence[str] | None, options: Options) -> Picture:
    """The picture of one or several timelines on one time axis.

    Raises:
        RenderError: a window, a unit or a number of titles that does not fit, or more than can be shown.
    """
    if titles is not None and len(titles) != len(timelines):
        raise RenderError(f"{len(timelines)} timelines but {len(titles)} titles; give one title each")
    check_units(timelines, titles)
    several = len(timelines) > 1
    views = [
        view(t, options.devices, options.microbatches, options.time, options.width, steady)
        for t, steady in zip(timelines, steady_windows(timelines), strict=True)
    ]
    begin, end = min(v.begin for v in views), max(v.end for v in views)
    width = (
        max(
            axis_width(v, options.width) * ((end - begin) / (v.end - v.begin) if v.end > v.begin else 1.0)
            for v in views
        )
        if options.width is None
        else options.width
    )
    width = min(width, 4_800.0) if options.width is None else width
    if several and any(v.fitted for v in views):
        width = fitted_width(views)
    axis = Axis(begin, end, MARGIN + LEFT, width / (end - begin) if end > begin else 0.0)
    heads = headline(timelines, views, several)
    names = list(titles) if titles is not None else [name_of(t) for t in timelines]
    y = MARGIN
    items: list[Item] = []
    for row, (text, size, ink, css) in enumerate(heads):
        y += size * 0.75
        items.append(Text(MARGIN, y, text, size, bold=row == 0, ink=ink, css=css))
        y += size * 0.75
    memories = [_memory(t, options, several) for t in timelines]
    all_tasks = [Tasks.of(v, f"p{i}-" if several else "", options.critical) for i, v in enumerate(views)]
    room = LIMIT_ROOM if any(m is not None and m.limit is not None for m in memories) else 6.0
    wide = [text_width(text, size) * (1.12 if row == 0 else 1.05) for row, (text, size, _, _) in enumerate(heads)]
    if several:
        wide += [
            summary_left(name, axis.left) + text_width(summary(t), 9.5)
            for name, t in zip(names, timelines, strict=True)
        ]
    full = max(width + LEFT + room, *wide) + 2 * MARGIN
    if options.legend:
        y += 6
        legend, y = legend_items(all_tasks, options.lanes, options.copies, y, full - MARGIN)
        items += legend
    y += 22
    axis_y = y
    panels: list[Panel] = []
    for v, tasks, memory, index in zip(views, all_tasks, memories, range(len(views)), strict=True):
        panels.append(_panel(v, tasks, memory, names[index] if several else "", y + 6, options))
        y = panels[-1].bottom
    for panel in panels:
        items += _below(panel, axis)
    items += _grid(axis, axis_y, panels, timelines[0].costs.unit)
    for panel in panels:
        items += _above(panel, axis, options, several)
    height = y + MARGIN
    name = printable(timelines[0].plan.graph.name)
    return Picture(scene(items, full, height, name, COMMAND), True, (full, height), options.timeout)


def _memory(timeline: Timeline, options: Options, several: bool) -> Memory | None:
    """With several timelines memory is drawn on request only."""
    wanted = not several if options.memory is None else options.memory
    if options.memory is None and options.memory_limit is not None:
        wanted = True
    return choose_memory(timeline, wanted, options.memory_limit)


def _panel(v: View, tasks: Tasks, memory: Memory | None, title: str, top: float, options: Options) -> Panel:
    count = len(v.devices)
    lane_height = LANE_HEIGHT if count <= 24 else 20.0 if count <= 48 else 13.0
    gap = (15.0 if options.copies else 9.0) if count <= 24 else 5.0 if count <= 48 else 3.0
    copy_height = 9.0 if options.lanes else 0.0
    y = top + (20 if title else 2) + (ROOM if v.timeline.plan.asynchronous else 0)
    lane, strips = {}, {}
    for device in v.devices:
        lane[device] = y
        y += lane_height + (2 * (copy_height + 2) if options.lanes else 0) + gap
    strip_height = 24.0 if count <= 16 else 14.0 if count <= 48 else 10.0
    if memory is not None:
        y += 22
        for device in v.devices:
            strips[device] = y
            y += strip_height + (6 if strip_height > 20 else 3)
    return Panel(v, tasks, memory, title, lane, strips, lane_height, copy_height, strip_height, top, y)


def _below(panel: Panel, axis: Axis) -> list[Item]:
    """The grey lanes: what stays visible of them is the bubble. They end with their own timeline."""
    timeline = panel.view.timeline
    left, right = (
        axis.x(panel.view.begin),
        axis.x(min(panel.view.end, max(timeline.makespan, panel.view.begin))),
    )
    items: list[Item] = []
    for device, y in panel.lane.items():
        items.append(
            Box(
                left,
                y,
                max(right - left, 1.0),
                panel.lane_height,
                LANE,
                id=f"{panel.tasks.prefix}lane-{device}",
                css="lane",
                tooltip=(f"device {device}: {timeline.busy[device]:.1%} busy", "grey is the bubble"),
            )
        )
        for step in range(2 if panel.copy_height else 0):
            top = y + panel.lane_height + 2 + step * (panel.copy_height + 2)
            items.append(Box(left, top, max(right - left, 1.0), panel.copy_height, LANE, css="lane copy-lane"))
    return items


def ticks(begin: float, end: float, room: float) -> list[float]:
    """Round numbers in [begin, end], at most about ``room`` of them, in steps of 1, 2 or 5."""
    span = end - begin
    if not span > 0:
        return [begin]
    least = span / max(room, 1.0)
    power = 10.0 ** np.floor(np.log10(least))
    step = next(float(power * f) for f in (1, 2, 5, 10) if power * f >= least * (1 - 1e-9))
    first = int(np.ceil(begin / step - 1e-9))
    return [n * step for n in range(first, int(np.floor(end / step + 1e-9)) + 1)]


def _grid(axis: Axis, top: float, panels: Sequence[Panel], unit: str) -> list[Item]:
    """The axis, and lines down through lanes and strips that spare the headings between them."""
    marks = ticks(axis.begin, axis.end, (axis.right - axis.left) / 70)
    rows: list[Item] = []
    for panel in panels:
        tall = panel.lane_height + (2 * (panel.copy_height + 2) if panel.copy_height else 0)
        spans = [(min(panel.lane.values()) - 3, max(panel.lane.values()) + tall + 3)]
        if panel.strips:
            spans.append((min(panel.strips.values()), max(panel.strips.values()) + panel.strip_height + 3))
        rows += [Line(((axis.x(t), a), (axis.x(t), b)), GRID, 0.5, css="grid") for a, b in spans for t in marks]
    rows.append(Line(((axis.left, top), (axis.right, top)), AXIS, 0.75, id="axis", css="axis"))
    rows += [Line(((axis.x(t), top - 3), (axis.x(t), top)), AXIS, 0.75, css="tick") for t in marks]
    rows += [Text(axis.x(t), top - 9, f"{round(t, 10):.6g}", 9, "c", ink=AXIS, css="tick") for t in marks]
    label = f"time ({shorten(unit, 12)})" if unit else "time"
    rows.append(Text(axis.left - 8, top - 1, label, 9, "r", ink=AXIS, css="axis"))
    return rows


def _above(panel: Panel, axis: Axis, options: Options, several: bool) -> list[Item]:
    timeline, tasks = panel.view.timeline, panel.tasks
    items: list[Item] = []
    if panel.title:
        title = shorten(panel.title, 60)
        items.append(Text(MARGIN, panel.top + 9, title, 11, bold=True, css="panel-title"))
        items.append(
            Text(
                summary_left(title, axis.left),
                panel.top + 9,
                summary(timeline),
                9.5,
                ink="#333333",
                css="summary",
            )
        )
    for device, y in panel.lane.items():
        items += _lane_names(panel, device, y, axis.left, options.lanes)
    # Arrows pass under the boxes, so that every number stays readable.
    if options.copies:
        items += copy_arrows(tasks, panel.view, axis.x, panel.lane, panel.lane_height)
    if options.critical:
        items += critical_links(tasks, panel.view, axis.x, panel.lane, panel.lane_height)
    items += task_boxes(tasks, panel.view, axis.x, axis.scale, panel.lane, panel.lane_height)
    items += group_frames(tasks, panel.view, axis.x, panel.lane, panel.lane_height)
    if timeline.plan.asynchronous:
        seen = (axis.begin, min(panel.view.end, axis.end))
        items += step_borders(timeline, axis.x, *seen, panel.lane, panel.lane_height, tasks.prefix)
    if options.lanes:
        for device, y in panel.lane.items():
            items += copy_lane(tasks, device, axis.x, panel.view, y + panel.lane_height + 2, panel.copy_height)
    if several and axis.begin <= timeline.makespan <= min(axis.end, panel.view.end):
        x, last = axis.x(timeline.makespan), max(panel.lane.values()) + panel.lane_height
        items.append(Line(((x, min(panel.lane.values()) - 3), (x, last + 3)), INK, 1.2, css="makespan"))
    if panel.memory is not None:
        first = min(panel.strips.values())
        items.append(Text(axis.left, first - 9, panel.memory.title, 9, ink=PALE, css="memory-title"))
        count = sum(len(steps(timeline, panel.memory, d, panel.view.begin, panel.view.end)[0]) for d in panel.strips)
        for device, y in panel.strips.items():
            below, above = strip(
                timeline,
                panel.memory,
                device,
                y,
                panel.strip_height,
                axis.x(panel.view.begin),
                axis.scale,
                panel.view.begin,
                panel.view.end,
                count <= FILLED,
                tasks.prefix,
                y == first,
            )
            items += below + above
    return items


def _lane_names(panel: Panel, device: int, y: float, left: float, lanes: bool) -> list[Item]:
    timeline = panel.view.timeline
    names = [
        s.name
        for c in timeline.plan.chunks
        if c.device == device
        for s in (timeline.plan.graph.stages[i] for i in c.stages)
    ]
    tip = (
        f"device {device} runs "
        + ", ".join([*(shorten(n) for n in names[:12]), *(["..."] if len(names) > 12 else [])]),
    )
    middle, busy = y + panel.lane_height / 2, f"{timeline.busy[device]:.0%} busy"
    items: list[Item]
    if panel.lane_height >= 24:
        items = [
            Text(left - 8, middle - 6, f"device {device}", 10, "r", tooltip=tip, css="device"),
            Text(left - 8, middle + 6, busy, 8.5, "r", ink=PALE, css="busy"),
        ]
    else:
        items = [
            Text(
                left - 8,
                middle,
                f"device {device}: {busy}",
                8 if panel.lane_height > 15 else 7.5,
                "r",
                tooltip=tip,
                css="device",
            )
        ]
    for step, word in enumerate(("out", "in") if lanes else ()):
        items.append(
            Text(
                left - 8,
                y + panel.lane_height + 2 + step * (panel.copy_height + 2) + panel.copy_height / 2,
                word,
                7.5,
                "r",
                ink=PALE,
                css="copy-lane",
            )
        )
    return items


__all__ = ["LIMIT", "Options", "draw_timelines", "summary", "ticks"]
