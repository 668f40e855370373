"""What part of a timeline is drawn: windows asked for, bands of large plans, and hard limits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import frozen

from pipec.errors import RenderError
from pipec.ir import Lane
from pipec.periods import periods
from pipec.render.dot import text_width
from pipec.timeline import Timeline

BAND = 9_000  # tasks a picture holds before only its beginning is drawn
MOST = 20_000  # tasks a window may ask for
THIN = 3.0  # points: a task drawn narrower than this on average is a smear
WIDEST = 2_400.0  # points, the widest time axis chosen
ROOM = 24.0  # points, a comfortable average task
VERSIONED = 33.0  # points, an average task with a weight version under its number
CLOSE = 24.0  # points, enough for such a task
TIGHT = 20.0  # points, the least for one
DENSE = 14.0  # points, for such a task beside other timelines, or in a long step: only some have room for the version
FITTED = 860.0  # points: the time axis of an asynchronous plan, where that is enough; a screen with its margins
MOST_DEVICES = 512


@frozen(eq=False)
class View:
    """The part of one timeline that is drawn. ``shown`` and ``others``: compute tasks per device."""

    timeline: Timeline
    devices: tuple[int, ...]
    begin: float
    end: float
    shown: dict[int, npt.NDArray[np.int32]]
    others: dict[int, npt.NDArray[np.int32]]
    note: str
    fitted: bool = False  # the time was chosen here, for an asynchronous plan

    @property
    def count(self) -> int:
        return sum(len(ids) for ids in self.shown.values())

    @property
    def mean(self) -> float:
        """The mean duration of the tasks shown that take time."""
        spans = np.concatenate(
            [self.timeline.end[i] - self.timeline.start[i] for i in self.shown.values()] or [np.zeros(1)]
        )
        spans = spans[spans > 0]
        return float(spans.mean()) if len(spans) else 1.0


def numbers(given: Any, what: str, count: int) -> tuple[int, ...]:
    """A window over ``count`` devices or microbatches: one number, or several in any collection.

    Raises:
        RenderError: it is no number, or one that the plan has not.
    """
    chosen: Sequence[Any] = (
        [given]
        if isinstance(given, (int, np.integer))
        else (list(given) if isinstance(given, Iterable) and not isinstance(given, (str, bytes)) else [])
    )
    good = [n for n in chosen if isinstance(n, (int, np.integer)) and not isinstance(n, bool) and 0 <= n < count]
    if not chosen or len(good) < len(chosen):
        raise RenderError(f"{what}={given!r}: expected numbers from 0 to {count - 1}, such as range(0, {count})")
    return tuple(sorted({int(n) for n in good}))


def interval(given: Any) -> tuple[float, float]:
    """A window of time. Raises RenderError when it is not two ascending numbers."""
    try:
        begin, end = (float(part) for part in given)
    except (TypeError, ValueError):
        begin = end = 0.0
    if not begin < end:
        raise RenderError(f"time={given!r}: expected two ascending numbers, such as (0, 100)")
    return begin, end


def view(
    timeline: Timeline,
    devices: Any = None,
    microbatches: Any = None,
    time: Any = None,
    width: float | None = None,
    steady: tuple[float, float] | None = None,
) -> View:
    """The tasks to draw: all, a window, or for a large plan without a window its beginning.

    ``steady``: the time to draw of an asynchronous plan without a window, see :func:`steady_windows`.

    Raises:
        RenderError: an empty or impossible window, or one with more tasks than a picture can show.
    """
    plan = timeline.plan
    chosen = tuple(range(plan.devices)) if devices is None else numbers(devices, "devices", plan.devices)
    if len(chosen) > MOST_DEVICES:
        raise RenderError(
            f"{len(chosen)} devices are too many for one picture (at most {MOST_DEVICES}); draw some of "
            f"them: devices=range(0, {min(64, plan.devices)})"
        )
    wanted = None if microbatches is None else numbers(microbatches, "microbatches", plan.microbatches)
    lanes = {d: plan.lanes[d][Lane.COMPUTE] for d in chosen}
    begin, end = (0.0, timeline.makespan) if time is None else interval(time)
    steady = steady if time is None and wanted is None and width is None else None
    begin, end = steady or (begin, end)
    if begin < timeline.makespan:  # an axis past the end would show nothing
        end = min(end, timeline.makespan)
    inside = {d: _inside(timeline, ids, begin, end) for d, ids in lanes.items()}
    if wanted is not None:
        inside, begin, end = _narrow(timeline, inside, wanted, begin, end, time is not None)
    if time is not None and not any(len(ids) for ids in inside.values()):
        raise RenderError(
            f"nothing runs in time=({begin:g}, {end:g}) on the devices shown; the timeline ends at "
            f"{timeline.makespan:g}"
        )
    window = devices is not None or wanted is not None or time is not None
    made = View(timeline, chosen, begin, end, inside, {d: lanes[d][:0] for d in chosen},
                "" if steady is None else _steady_note(timeline, begin, end), steady is not None)
    if not window:
        return _band(made, width)
    _check(made, width)
    others = {d: np.setdiff1d(_inside(timeline, ids, begin, end), inside[d]) for d, ids in lanes.items()}
    return View(
        timeline,
        chosen,
        begin,
        end,
        inside,
        others if wanted is not None else made.others,
        _window_note(made, devices is not None, wanted),
        made.fitted,
    )


def steady_windows(timelines: Sequence[Timeline]) -> list[tuple[float, float] | None]:
    """The time of each timeline that is drawn where none is asked for: of asynchronous plans what :func:`_steady` says,
    from the start and to one end where several stand under each other. None: all of it."""
    made = [_steady(timeline) if timeline.plan.asynchronous else None for timeline in timelines]
    if len(made) == 1 or not any(made):
        return made
    last = max(_goes_on(t, own) for t, own in zip(timelines, made, strict=True) if own is not None)
    return [(0.0, min(last, t.makespan)) if t.plan.asynchronous else None for t in timelines]


def _steady(timeline: Timeline) -> tuple[float, float] | None:
    """When two steady steps run, or one where two are too long, with as much of what leads to them as fits; None where
    everything does."""
    room, spans = _room(timeline), _steady_spans(timeline)
    if not spans or timeline.makespan <= room:
        return None
    begin = spans[0][0]
    end = max((end for _, end in spans[:2] if end - begin <= room), default=spans[0][1])
    begin = max(0.0, min(begin, end - room))
    return begin if begin > 0.1 * end else 0.0, end  # no little piece is left out


def _goes_on(timeline: Timeline, shown: tuple[float, float]) -> float:
    """Until when a timeline is drawn beside others, from the start on: of steady steps that are long, which go on as
    they began, only the beginning."""
    begin, end = _steady_spans(timeline)[0]
    room = _room(timeline)
    return shown[1] if end - begin <= room else float(f"{begin + room / 3:.3g}")


def _room(timeline: Timeline) -> float:
    """The time for which tasks with a weight version have room on a screen; 0 where no task takes time."""
    plan = timeline.plan
    spans = (timeline.end - timeline.start)[np.concatenate([own[Lane.COMPUTE] for own in plan.lanes])]
    spans = spans[spans > 0]
    return FITTED / CLOSE * float(spans.mean()) if len(spans) else 0.0


def _steady_spans(timeline: Timeline) -> list[tuple[float, float]]:
    """When the steady steps begin and end; none where no task takes time."""
    plan, found = timeline.plan, periods(timeline.plan)
    if not _room(timeline):
        return []
    steps = [found.ids(step) for step in range(found.steady, plan.minibatches)]
    return [(float(timeline.start[own].min()), float(timeline.end[own].max())) for own in steps]


def _steady_note(timeline: Timeline, begin: float, end: float) -> str:
    first = _steady_spans(timeline)[0]
    what = (
        "steady steps and what leads to them" if end >= first[1] - 1e-9 * timeline.makespan else
        f"what leads to the steady steps and how they begin: they go on alike, each in {timeline.period:.6g}"
    )
    return (
        f"{what}: time {begin:.6g} to {end:.6g} of {timeline.makespan:.6g}; "
        f"all of it with time=(0, {timeline.makespan:.6g})"
    )


def _inside(timeline: Timeline, ids: npt.NDArray[np.int32], begin: float, end: float) -> npt.NDArray[np.int32]:
    start, stop = timeline.start[ids], timeline.end[ids]
    seen = ((start < end) & (stop > begin)) | ((start == stop) & (start >= begin) & (start <= end))
    return np.asarray(ids[seen], np.int32)


def _narrow(
    timeline: Timeline,
    inside: dict[int, npt.NDArray[np.int32]],
    wanted: tuple[int, ...],
    begin: float,
    end: float,
    fixed: bool,
) -> tuple[dict[int, npt.NDArray[np.int32]], float, float]:
    """Only the microbatches wanted, and the time they take unless that is fixed."""
    from pipec.ir import Kind

    table = timeline.plan.table
    kept = {
        d: ids[np.isin(table.microbatch[ids], wanted) & (table.kind[ids] != Kind.UPDATE)] for d, ids in inside.items()
    }
    every = np.concatenate(list(kept.values()))
    if not fixed and len(every):
        begin, end = float(timeline.start[every].min()), float(timeline.end[every].max())
    return kept, begin, end


def axis_width(view: View, width: float | None = None) -> float:
    """Points for the time axis: comfortable tasks where they fit, at most ``WIDEST`` unless asked for."""
    if width is not None:
        return width
    per_task = (view.end - view.begin) / view.mean if view.end > view.begin else 1.0
    if view.timeline.excerpt is not None:  # numbers as long as the run
        return min(max(per_task * (VERSIONED + text_width(view.timeline.excerpt.widest, 7.0)), 520.0), WIDEST)
    if view.fitted:
        wanted = min(per_task * VERSIONED, FITTED), min(per_task * TIGHT, 1.1 * FITTED), per_task * DENSE
        return min(max(*wanted, 520.0), WIDEST)
    if view.timeline.plan.asynchronous:  # forwards too have room for their microbatch and weight version
        return min(max(per_task * VERSIONED, 520.0), WIDEST)
    return min(max(min(per_task * ROOM, 1100.0), per_task * ROOM / 2.5, 520.0), WIDEST)


def fitted_width(views: Sequence[View]) -> float:
    """Points for the time axis of several timelines, some of which are of asynchronous plans, with a chosen time."""
    span = max(view.end for view in views) - min(view.begin for view in views)
    return min(max([FITTED, *(span / view.mean * DENSE for view in views if view.fitted)]), WIDEST)


def _band(whole: View, width: float | None) -> View:
    """All of it where it is legible, else as much of the beginning as is."""
    timeline = whole.timeline
    starts = np.sort(np.concatenate([timeline.start[i] for i in whole.shown.values()]))
    end = whole.end
    if len(starts) > BAND:
        end = min(end, float(starts[BAND]))
    end = min(end, whole.begin + (width or WIDEST) / THIN * whole.mean)
    if end >= whole.end:
        return whole
    shown = {d: _inside(timeline, ids, whole.begin, end) for d, ids in whole.shown.items()}
    made = View(timeline, whole.devices, whole.begin, end, shown, whole.others, "")
    touched = timeline.plan.table.microbatch[np.concatenate(list(shown.values()))]
    note = (
        f"only the beginning is drawn: time {made.begin:.6g} to {end:.6g} of {timeline.makespan:.6g}, "
        f"microbatches 0 to {touched.max(initial=0)} of {timeline.plan.microbatches}, "
        f"{made.count:,} of {whole.count:,} tasks; choose with time=, microbatches=, devices="
    )
    return View(timeline, whole.devices, whole.begin, end, shown, whole.others, note)


def _check(made: View, width: float | None) -> None:
    """Hard limits of a window that was asked for."""
    axis = width or WIDEST
    span = made.end - made.begin
    if made.count > MOST or (span and made.mean * axis / span < THIN / 3):
        part = min(1.0, BAND / max(made.count, 1), made.mean * axis / THIN / span if span else 1.0)
        raise RenderError(
            f"this window holds {made.count:,} tasks, which would be a smear; one that can be read: "
            f"time=({made.begin:.6g}, {made.begin + part * span:.6g})"
        )


def _window_note(made: View, some_devices: bool, wanted: tuple[int, ...] | None) -> str:
    plan = made.timeline.plan
    parts = [f"time {made.begin:.6g} to {made.end:.6g} of {made.timeline.makespan:.6g}"]
    if wanted is not None:
        parts.append(f"microbatches {_ranges(wanted)} of {plan.microbatches}")
    if some_devices:
        parts.append(f"devices {_ranges(made.devices)} of {plan.devices}")
    return "window: " + ", ".join(parts)


def _ranges(values: tuple[int, ...]) -> str:
    """``0-3, 7`` for 0 1 2 3 7."""
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)
