"""Chrome/Perfetto traces: one or several timelines as JSON for ui.perfetto.dev or chrome://tracing.

A process per timeline, a track per lane of every device, a flow per copy, and counters of what is alive. Times are
whole nanoseconds, written in microseconds with three decimals as the format wants.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import field, frozen

from pipec.errors import RenderError
from pipec.ir import Kind, Lane, Plan, Task
from pipec.paths import file_path
from pipec.render.arrows import readers_of_copies, sent_by
from pipec.timeline import Timeline

Nanoseconds = npt.NDArray[np.int64]
Event = dict[str, Any]

UNITS = {"ns": 1, "us": 1_000, "µs": 1_000, "μs": 1_000, "ms": 1_000_000, "s": 1_000_000_000, "min": 60_000_000_000}
LONG = {"nanosecond": "ns", "microsecond": "us", "millisecond": "ms", "second": "s", "sec": "s", "minute": "min"}
LANES = {Lane.COMPUTE: "", Lane.OUT: " copies out", Lane.IN: " copies in"}
FARTHEST = float(2**62)  # ns, what 64 bits hold with room to add


@frozen(eq=False)
class Clock:
    """Start and end of every task in whole nanoseconds, and what one unit of the timeline was taken for."""

    begin: Nanoseconds
    end: Nanoseconds
    scale: int  # nanoseconds in one unit of the timeline
    said: str  # for readers


@frozen(eq=False)
class Track:
    """One row of the trace: tasks that do not overlap, and copies that take no time."""

    name: str
    slices: tuple[int, ...]
    instants: tuple[int, ...]


@frozen(eq=False)
class Process:
    """A timeline with its name and the numbers that tell its tracks from all others in the file."""

    pid: int
    name: str
    timeline: Timeline
    clock: Clock
    tids: Iterator[int] = field(repr=False)


def write_trace(
    timelines: Timeline | Sequence[Timeline],
    path: str | Path,
    *,
    names: Sequence[str] | None = None,
    unit: str = "ms",
) -> None:
    """Write timelines, simulated or measured, as one Chrome/Perfetto trace; gzip when ``path`` ends in ``.gz``.

    Every timeline is a process, and all begin at time zero. A task is a slice whose arguments are its token, kind,
    stage, microbatch and weight version (a copy: its value, route, and bytes where known). A task that takes no
    time is a slice of duration zero, a copy that takes none an instant. Copies that overlap on a lane, which only
    measured ones do, get further tracks. A flow leads from the task that made what a copy carries to the
    first task that reads it. Counters show the live activations of every device, in shares, and its live bytes
    where all sizes are known.

    Args:
        timelines: one or several.
        path: the file to write.
        names: a name per timeline; by default pipeline, schedule and "simulated" or "measured".
        unit: what one unit is shown as in a timeline whose costs name no unit of time (ns, us, ms, s, min): there
            is no other way to put it on a clock. The process is labelled with it.

    Raises:
        RenderError: no timeline, something else than a timeline, names that do not fit, an unknown unit, times
            or sizes that are not finite or too large for the format, or a file that cannot be written.
    """
    given = [timelines] if isinstance(timelines, Timeline) else list(timelines)
    processes = _processes(given, names, unit)
    target = file_path(path, RenderError)
    try:
        with target.open("wb") as file:
            if target.suffix.lower() == ".gz":
                with gzip.GzipFile("", "wb", 6, file, mtime=0) as packed:  # no name, no date: equal runs, equal bytes
                    packed.writelines(_text(processes))
            else:
                file.writelines(_text(processes))
    except OSError as error:
        raise RenderError(f"cannot write {target}: {error.strerror or error}") from None


def time_unit(name: str) -> str | None:
    """The short name of a unit of time, None when ``name`` is none that a clock knows."""
    word = name.strip().lower()
    word = LONG.get(word.removesuffix("s"), word)
    return word if word in UNITS else None


def _processes(given: list[Timeline], names: Sequence[str] | None, unit: str) -> list[Process]:
    if not given:
        raise RenderError("no trace to write: the list of timelines is empty")
    for item in given:
        if not isinstance(item, Timeline):
            raise RenderError(
                f"a trace is made of timelines, got {type(item).__name__}; use plan.simulate() or run.trace()"
            )
    if names is not None and (isinstance(names, str) or len(names) != len(given)):
        raise RenderError(f"names: expected a list of {len(given)}, one per timeline, got {names!r}")
    default = time_unit(unit)
    if default is None:
        raise RenderError(f"unit={unit!r}: expected one of {', '.join(UNITS)}")
    called = [str(name) for name in names] if names is not None else _distinct([_name(t) for t in given])
    tids = count(len(given) + 1)  # no two tracks of a file share a number, nor one with a process
    return [
        Process(pid, name, timeline, _clock(timeline, name, default), tids)
        for pid, (name, timeline) in enumerate(zip(called, given, strict=True), 1)
    ]


def _name(timeline: Timeline) -> str:
    plan = timeline.plan
    what = "" if timeline.excerpt is None else f" {timeline.excerpt.name}"
    return f"{plan.graph.name}: {plan.schedule}, {'measured' if timeline.measured else 'simulated'}{what}"


def _distinct(names: list[str]) -> list[str]:
    made: list[str] = []
    for number, name in enumerate(names):
        again = names[:number].count(name)
        made.append(f"{name} ({again + 1})" if again else name)
    return made


def _clock(timeline: Timeline, name: str, default: str) -> Clock:
    own = time_unit(timeline.costs.unit)
    shown = own or default
    scale = UNITS[shown]
    if not np.isfinite(timeline.end).all() or not np.isfinite(timeline.start).all():
        raise RenderError(f"{name!r} has a task that never ends; a trace needs finite costs")
    if timeline.makespan * scale > FARTHEST:
        raise RenderError(
            f"{name!r} lasts {timeline.makespan:g} {shown}, which is more nanoseconds than the format holds; "
            "give the costs in a smaller unit"
        )
    weights = timeline.byte_weights
    if weights is not None and not np.isfinite(weights).all():
        raise RenderError(f"{name!r} has sizes that are not finite; give bytes as numbers")
    said = f"times in {own}" if own else f"1 {timeline.costs.unit or 'unit of time'} shown as 1 {shown}"
    begin, end = (np.rint(part * scale).astype(np.int64) for part in (timeline.start, timeline.end))
    return Clock(begin, end, scale, said)


# -- tracks -----------------------------------------------------------------------------------------------------


def _rows(ids: list[int], clock: Clock) -> list[list[int]]:
    """Tasks in as few rows as keep them from overlapping, each in the order of time."""
    rows: list[list[int]] = []
    for task in sorted(ids, key=lambda i: (int(clock.begin[i]), int(clock.end[i]), i)):
        for row in rows:
            if clock.end[row[-1]] <= clock.begin[task]:
                row.append(task)
                break
        else:
            rows.append([task])
    return rows


def tracks(plan: Plan, clock: Clock) -> Iterator[Track]:
    """Per device its compute lane, and its copy lanes where there are copies."""
    for device, lanes in enumerate(plan.lanes):
        for lane, column in zip(Lane, lanes, strict=True):
            ids = column.tolist()
            timed = [i for i in ids if lane is Lane.COMPUTE or clock.begin[i] < clock.end[i]]
            instants = tuple(i for i in ids if lane is not Lane.COMPUTE and clock.begin[i] == clock.end[i])
            rows = _rows(timed, clock) or ([[]] if lane is Lane.COMPUTE or instants else [])
            for number, row in enumerate(rows):
                more = f" ({number + 1})" if number else ""
                yield Track(f"device {device}{LANES[lane]}{more}", tuple(row), () if number else instants)


@frozen(eq=False)
class Flows:
    """Per task the copies whose arrow leaves it, and those whose arrow arrives."""

    leaving: dict[int, list[int]]
    arriving: dict[int, list[int]]


def flows_of(plan: Plan) -> Flows:
    """Arrows of copies, from the task that made what a copy carries to the first one that reads it."""
    table = plan.table
    flows = Flows({}, {})
    for copy, reader in sorted(readers_of_copies(plan).items()):
        made = [
            w for w in plan.waits.of(sent_by(plan, copy)).tolist()
            if table.kind[w] != Kind.COPY and table.device[w] == table.device[copy]
        ]
        if made:
            flows.leaving.setdefault(max(made), []).append(copy)
            flows.arriving.setdefault(reader, []).append(copy)
    return flows


# -- events -----------------------------------------------------------------------------------------------------


def _events(process: Process, first_flow: int) -> Iterator[Event]:
    plan, clock, pid = process.timeline.plan, process.clock, process.pid
    yield _about("process_name", pid, name=process.name)
    yield _about("process_labels", pid, labels=process.clock.said)
    yield _about("process_sort_index", pid, sort_index=pid)
    flows, sizes = flows_of(plan), _sizes(process.timeline)
    for order, track in enumerate(tracks(plan, clock)):
        tid = next(process.tids)
        yield _about("thread_name", pid, tid, name=track.name)
        yield _about("thread_sort_index", pid, tid, sort_index=order)
        for index in track.slices:
            task = plan.table.task(index)
            at = {"pid": pid, "tid": tid, "ts": int(clock.begin[index])}
            length = int(clock.end[index] - clock.begin[index])
            yield {"ph": "X", **_label(process.timeline, task, sizes), **at, "dur": length}
            if task.kind is Kind.COPY:
                continue
            # Arrows bind to the slice around them, so right after it in the file and at its last nanosecond.
            for copy in flows.arriving.get(index, ()):
                yield {"ph": "f", "bp": "e", "id": first_flow + copy, **FLOW, **at}
            for copy in flows.leaving.get(index, ()):
                yield {"ph": "s", "id": first_flow + copy, **FLOW, **at, "ts": at["ts"] + max(length - 1, 0)}
        for index in track.instants:
            task = plan.table.task(index)
            at = {"pid": pid, "tid": tid, "ts": int(clock.begin[index])}
            yield {"ph": "i", "s": "t", **_label(process.timeline, task, sizes), **at}
    yield from _counters(process)


FLOW = {"name": "copy", "cat": "copy"}


def _about(what: str, pid: int, tid: int = 0, **values: Any) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": values}


def _sizes(timeline: Timeline) -> list[int | None]:
    from pipec.simulate import value_bytes

    return value_bytes(timeline.plan, timeline.costs)


def _label(timeline: Timeline, task: Task, sizes: list[int | None]) -> Event:
    """Name, category and arguments of a task."""
    plan = timeline.plan
    stage = plan.graph.stages[task.stage].name if task.stage >= 0 else "all stages"
    kind = task.kind.name.lower()
    about: dict[str, Any] = {"task": str(task), "kind": kind, "stage": stage}
    if timeline.excerpt is not None:
        about["minibatch"], about["microbatch"] = timeline.item(task)
    else:
        about["minibatch" if task.kind is Kind.UPDATE else "microbatch"] = task.microbatch
    if plan.slices > 1:
        about["slice"] = task.slice
    if plan.replicas > 1:
        about["replica"] = task.replica
    if task.kind is not Kind.COPY:
        about["weight version"] = task.version
        return {"name": f"{task} {stage}", "cat": kind, "args": about}
    value, size = plan.graph.values[task.value].name, sizes[task.value]
    about |= {"value": value, "gradient": task.gradient,
              "from device": "host" if task.host == "from" else task.device,
              "to device": "host" if task.host == "to" else task.peer}
    if size is not None:
        about["bytes"] = size
    return {"name": f"{task} {value}", "cat": kind, "args": about}


def _counters(process: Process) -> Iterator[Event]:
    timeline = process.timeline
    for device in range(timeline.plan.devices):
        yield from _counter(process, device, "live activations", "shares", timeline.share_weights)
        if timeline.byte_weights is not None:
            yield from _counter(process, device, "live memory", "bytes", timeline.byte_weights)


def _counter(process: Process, device: int, what: str, unit: str, weights: npt.NDArray[np.float64]) -> Iterator[Event]:
    times, levels = process.timeline.memory(device, weights)
    ts = np.rint(times * process.clock.scale).astype(np.int64)
    last = np.append(np.diff(ts) != 0, True)[: len(ts)]  # one level an instant
    steps = list(zip(ts[last].tolist(), levels[last].tolist(), strict=True))
    if not steps or steps[0][0] > 0:
        steps.insert(0, (0, 0.0))
    for at, level in steps:
        number = int(level) if float(level).is_integer() else level
        yield {"ph": "C", "name": f"device {device} {what}", "pid": process.pid, "ts": at, "args": {unit: number}}


# -- text -------------------------------------------------------------------------------------------------------


def _text(processes: list[Process]) -> Iterator[bytes]:
    yield b'{"displayTimeUnit":"ns","otherData":'
    yield _json({"made by": "pipec", **{p.name: p.clock.said for p in processes}}).encode("ascii")
    yield b',"traceEvents":[\n'
    mark, flow = b"", 1
    for process in processes:
        for line in _lines(_events(process, flow)):
            yield mark + line
            mark = b",\n"
        flow += len(process.timeline.plan.table)
    yield b"\n]}\n"


def _lines(events: Iterable[Event]) -> Iterator[bytes]:
    for event in events:
        times = "".join(f'"{key}":{microseconds(event[key])},' for key in ("ts", "dur") if key in event)
        rest = _json({key: value for key, value in event.items() if key not in ("ts", "dur")})
        yield f"{{{times}{rest[1:]}".encode("ascii")


def microseconds(nanoseconds: int) -> str:
    """Whole nanoseconds as the text of exactly as many microseconds."""
    whole, rest = divmod(nanoseconds, 1_000)
    return f"{whole}.{rest:03d}" if rest else str(whole)


_json = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode  # made once: json.dumps would make one a call
