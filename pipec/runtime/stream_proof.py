"""What recorded stream calls guarantee, proved against the plan.

A device runs what is queued on one stream in order, and on different streams in any order that events allow. From the
recorded calls follows what each piece of work comes after, whatever the device does; that must cover everything the
plan's memory needs, and every reference must be dropped after all work on its memory, in the order of the stream whose
pool it goes back to.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from pipec.ir import Kind, Lane, Plan
from pipec.races import orders_needed
from pipec.runtime.stream_api import Call
from pipec.verify.form import lane_name


class Happened:
    """Per call, as a set of bits, the calls that have happened on the devices when it has."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = calls
        self.before: list[int] = []
        tails: dict[str, int] = {}  # by stream, all that has happened at its end
        events: dict[str, int] = {}
        for number, call in enumerate(calls):
            known = tails.get(call.stream, 0)
            if call.kind == "wait":
                known |= events.get(call.what, 0)  # of an earlier part: ended when the callers let this one begin
            if call.kind == "record":
                events[call.what] = known
            else:
                known |= 1 << number
            self.before.append(known)
            tails[call.stream] = known

    def ordered(self, first: int, second: int) -> bool:
        """Whether work ``first`` has always ended when ``second`` begins."""
        return first == second or bool(self.before[second] >> first & 1)


def problems(plan: Plan, calls: Sequence[Call]) -> list[str]:
    """Everything that the calls of one part of a step leave open; empty if they are right.

    Checked: every task runs once, on its lane's stream, with its device current; each lane's order is the plan's;
    whatever touches the same memory is in order; memory goes back after all that use it; the streams wait for their
    callers before, and the callers for all streams after.
    """
    happened = Happened(calls)
    places = {call.what: number for number, call in enumerate(calls) if call.kind == "run"}
    tasks = [str(plan.table.task(task)) for task in range(len(plan.table))]
    ran = [task for task, token in enumerate(tasks) if token in places]
    found = [f"{tasks[task]} does not run" for task in _expected(plan) if tasks[task] not in places]
    found += [f"{call.what} runs twice" for number, call in enumerate(calls)
              if call.kind == "run" and places[call.what] != number]
    at = {task: places[tasks[task]] for task in ran}
    found += _streams(plan, happened, at, tasks)
    for first, second, what in orders_needed(plan):
        if first in at and second in at and not happened.ordered(at[first], at[second]):
            found.append(f"{tasks[second]} {what} {tasks[first]}")
    found += _inputs(plan, happened, places, at, tasks)
    return found + _memory(calls, happened) + _callers(calls, happened)


def _expected(plan: Plan) -> list[int]:
    return [task for task, kind in enumerate(plan.table.kind.tolist()) if kind != Kind.UPDATE]


def _streams(plan: Plan, happened: Happened, at: dict[int, int], tasks: list[str]) -> list[str]:
    found, calls = [], happened.calls
    for task, number in at.items():
        row, call = plan.table.task(task), calls[number]
        stream, others = f"compute {row.device}", ()
        if row.kind is Kind.COPY:
            stream = f"in {row.peer}" if row.host == "from" else f"out {row.device}"
            others = () if row.host else (f"in {row.peer}",)  # type: ignore[assignment]
        if (call.stream, call.others) != (stream, others):
            found.append(f"{tasks[task]} runs on {call.stream} {call.others}, not on {stream} {others}")
    for device in range(plan.devices):
        for lane in Lane:
            order = [at[task] for task in plan.lanes[device][lane].tolist() if task in at]
            if order != sorted(order):
                found.append(f"the {lane_name(lane)} lane of device {device} runs in another order than the plan's")
            found += [
                f"{calls[second].what} may begin before {calls[first].what} on the {lane_name(lane)} lane of device "
                f"{device}" for first, second in pairwise(sorted(order)) if not happened.ordered(first, second)
            ]
    devices: dict[str, set[str]] = {}
    for call in calls:
        if call.kind == "run":
            devices.setdefault(call.stream, set()).add(call.device)
    return found + [f"{stream} runs with {seen} current" for stream, seen in devices.items() if len(seen) != 1]


def _inputs(
    plan: Plan, happened: Happened, places: dict[str, int], at: dict[int, int], tasks: list[str]
) -> list[str]:
    """Whoever reads an input comes after its copy to the device; one that is the same for all goes with the first."""
    found = []
    for number, item in enumerate(plan.graph.inputs):
        for task, place in at.items():
            row = plan.table.task(task)
            if row.kind not in (Kind.FORWARD, Kind.RECOMPUTE) or row.stage not in item.readers:
                continue
            piece = row.microbatch * plan.slices + row.slice
            names = [f"input {number}[{one}] for {row.device}" for one in (piece, 0)]
            copies = [places[name] for name in names if name in places][:1]
            found += [f"{tasks[task]} does not wait for {names[0]}" for copy in copies
                      if not happened.ordered(copy, place)]
    return found


def _memory(calls: Sequence[Call], happened: Happened) -> list[str]:
    """Memory that went back: all that names it has happened in the order of the stream that takes it back.

    What is queued on that stream next may be given the memory, so the end of the stream at that moment counts.
    """
    found = []
    left = len(calls) - 1
    while left >= 0 and calls[left].kind == "free":
        left -= 1  # after the callers have waited, the next part's streams wait for them first
    for number, call in enumerate(calls[: left + 1]):
        if call.what.startswith(MEMORY):
            name = call.what[len(MEMORY) :]
            writers = [w for w in range(number, left) if calls[w].what == name and not happened.ordered(number, w)]
            found += [f"{name} may write into memory that is still in use" for _ in writers]
        if call.kind != "free":
            continue
        token = call.what.rsplit(" ", 1)[0]
        for other in range(number):
            if _uses(calls[other], token, call) and not happened.ordered(other, number):
                found.append(f"{call.stream} takes back {call.what}, which {calls[other].what} may still use")
    return found


def _uses(call: Call, token: str, free: Call) -> bool:
    """Whether a call works on the memory of a copy: the copy itself, or the task that takes over what arrived."""
    if call.kind != "run":
        return False
    if free.what.endswith(" arrived") and call.what.startswith(TAKES):
        return token in call.what[len(TAKES) :].split(", ")
    return call.what == token


MEMORY, TAKES = "memory for ", "takes over "


def _callers(calls: Sequence[Call], happened: Happened) -> list[str]:
    found: list[str] = []
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for number, call in enumerate(calls):
        if call.stream.startswith("caller"):
            last[call.stream] = number
            first.setdefault(call.stream, number)
    if not last:
        return ["no caller's stream waits for the lanes"]
    after = {stream: happened.before[number] for stream, number in last.items()}
    recorded = {calls[number].what for number in first.values()}
    for stream in dict.fromkeys(call.stream for call in calls if not call.stream.startswith(("caller", "host"))):
        own = [number for number, call in enumerate(calls) if call.stream == stream]
        if not (calls[own[0]].kind == "wait" and calls[own[0]].what in recorded):
            found.append(f"{stream} does not wait for its caller first")
        works = [number for number in own if calls[number].kind == "run"]
        found += [f"no caller waits for {calls[number].what}" for number in works
                  if not after.get(f"caller {calls[number].device}", 0) >> number & 1]
    return found
