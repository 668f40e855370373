"""What recorded stream calls guarantee, proved against the plan.

A device runs what is queued on one stream in order, and on different streams in any order that events allow. From the
recorded calls follows what each piece of work comes after, whatever the device does; that must cover everything the
plan's memory needs, and every reference must be dropped after all work on its memory, in the order of the stream whose
pool it goes back to.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from attrs import evolve

from pipec.ir import Kind, Lane, Plan
from pipec.races import EARLY, orders_needed
from pipec.runtime.stream_api import Call
from pipec.verify.form import lane_name


class Happened:
    """Per call, as a set of bits, the calls that have happened on the devices when it has."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = calls
        self.before: list[int] = []
        tails: dict[str, int] = {}  # by stream, all that has happened at its end
        events: dict[str, int] = {}
        seen = 0  # by the host: whatever is queued later begins after it
        for number, call in enumerate(calls):
            known = tails.get(call.stream, 0) | seen
            if call.kind in ("wait", "past"):
                known |= events.get(call.what, 0)  # of an earlier part: ended when the callers let this one begin
            if call.stream == "host":
                seen |= known
            if call.kind == "record":
                events[call.what] = known
            else:
                known |= 1 << number
            self.before.append(known)
            tails[call.stream] = known

    def ordered(self, first: int, second: int) -> bool:
        """Whether work ``first`` has always ended when ``second`` begins."""
        return first == second or bool(self.before[second] >> first & 1)


def problems(plan: Plan, calls: Sequence[Call], until: int | None = None) -> list[str]:
    """Everything that the calls of one part of a step leave open; empty if they are right.

    Checked: every task runs once, on its lane's stream, with its device current; each lane's order is the plan's;
    whatever touches the same memory is in order; memory goes back after all that use it; the streams wait for their
    callers before, and the callers for all streams after. ``until``: microbatches from this one on may come back from
    host memory earlier than the plan says.
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
        if what is EARLY and until is not None and plan.table.microbatch[second] >= until:
            continue
        if first in at and second in at and not happened.ordered(at[first], at[second]):
            found.append(f"{tasks[second]} {what} {tasks[first]}")
    found += input_problems(plan, happened, places, at, tasks)
    found += replica_problems(plan, happened, places, at, tasks)
    return found + memory_problems(calls) + _callers(calls, happened)


def run_problems(plan: Plan, parts: Sequence[Sequence[Call]], steady: int) -> list[str]:
    """As :func:`problems`, of a run of an asynchronous plan: the calls of every step, then of the flush, in one order.

    Args:
        plan: with as many minibatches as were fed.
        parts: the calls of each step and of the flush, with names as the runner counts: from step ``steady`` on every
            step is called as that one is.
    """
    calls, found = [], []
    for number, part in enumerate(parts):
        own = list(part)
        found += _callers(own, Happened(own))
        calls += [_counted_on(plan, call, max(0, min(number, len(parts) - 2) - steady)) for call in own]
    # the last one's values come back as in a step that another one follows, whose forward is the task beside them
    return found + problems(plan, calls, plan.microbatches - plan.minibatch)


TASK, ITEM = re.compile(r"\b(\d+)([FRBU])(\d+)\b"), re.compile(r"('*)\b([a-z]*\s?\d+)\[(\d+)\]")


def _counted_on(plan: Plan, call: Call, steps: int) -> Call:
    """A call whose microbatches and updates count from the first step, not from ``steps`` later; what was sent in the
    step before is called after that one, with a mark in front."""
    updates = plan.minibatch // plan.update_every

    def task(found: re.Match[str]) -> str:
        by = updates if found[2] == "U" else plan.minibatch
        return f"{found[1]}{found[2]}{int(found[3]) + steps * by}"

    def item(found: re.Match[str]) -> str:
        return f"{found[2]}[{int(found[3]) + (steps - len(found[1])) * plan.minibatch}]"

    return evolve(call, what=ITEM.sub(item, TASK.sub(task, call.what)))


def _expected(plan: Plan) -> list[int]:
    kinds = plan.table.kind.tolist()
    return [task for task, kind in enumerate(kinds) if kind != Kind.UPDATE or plan.asynchronous]


def _streams(plan: Plan, happened: Happened, at: dict[int, int], tasks: list[str]) -> list[str]:
    found, calls = [], happened.calls
    for task, number in at.items():
        row, call = plan.table.task(task), calls[number]
        stream, others = f"compute {row.device}", ()
        if row.kind is Kind.COPY:
            stream = f"in {row.peer}" if row.host == "from" else f"out {row.device}"
            others = () if row.host else (f"in {row.peer}",)  # type: ignore[assignment]
        elif row.kind is Kind.REDUCE:
            stream, others = f"out {row.device}", call.others  # type: ignore[assignment]
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


def input_problems(
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
            first = piece - piece % (plan.minibatch * plan.slices)
            names = [f"input {number}[{one}] for {row.device}" for one in (piece, first)]
            copies = [places[name] for name in names if name in places][:1]
            found += [f"{tasks[task]} does not wait for {names[0]}" for copy in copies
                      if not happened.ordered(copy, place)]
    return found


def replica_problems(
    plan: Plan, happened: Happened, places: dict[str, int], at: dict[int, int], tasks: list[str]
) -> list[str]:
    """Whoever reads replicas of another device's parameters comes after the copy of their values, which comes after
    the step before on that device."""
    found, entered = [], dict[str, int]()
    for number, call in enumerate(happened.calls):
        if call.kind == "wait":
            entered.setdefault(call.stream, number)
    for name, place in places.items():
        if name.startswith(PARAMETERS):
            first = entered.get(f"in {name.rsplit(' ', 1)[1]}", -1)
            if first < 0 or not happened.ordered(first, place):
                found.append(f"{name} may write into replicas that are still in use")
    for task, place in at.items():
        row = plan.table.task(task)
        if row.kind is not Kind.FORWARD:
            continue
        for other in plan.graph.stages[row.stage].tied:
            name = f"{PARAMETERS}{plan.stage_device(other)} for {row.device}"
            if name in places and not happened.ordered(places[name], place):
                found.append(f"{tasks[task]} does not wait for {name}")
    return found


def memory_problems(calls: Sequence[Call]) -> list[str]:
    """Memory that went back, and what may still use it; ``calls`` of one part or of several in a row.

    The stream that takes it back may give it to the next work that is queued there. All that uses the memory must have
    happened when that begins.
    """
    found, happened = [], Happened(calls)
    following: dict[str, int] = {}  # by stream its next work
    for number in range(len(calls) - 1, -1, -1):
        call = calls[number]
        if call.kind == "run":
            following[call.stream] = number
        if call.what.startswith(MEMORY):
            name = call.what[len(MEMORY) :]
            writers = [w for w in range(number, len(calls))
                       if calls[w].what == name and not happened.ordered(number, w)]
            found += [f"{name} may write into memory that is still in use" for _ in writers]
        if call.kind != "free" or call.stream not in following:
            continue
        token, after = call.what.rsplit(" ", 1)[0], following[call.stream]
        for other in range(number):
            if _uses(calls[other], token, call) and not happened.ordered(other, after):
                found.append(f"{call.stream} takes back {call.what}, which {calls[other].what} may still use")
    return found[::-1]


def _uses(call: Call, token: str, free: Call) -> bool:
    """Whether a call works on the memory of a copy: the copy itself, or the task that takes over what arrived."""
    if call.kind != "run":
        return False
    if free.what.endswith(" arrived") and call.what.startswith(TAKES):
        return token in call.what[len(TAKES) :].split(", ")
    return call.what == token


MEMORY, TAKES, PARAMETERS = "memory for ", "takes over ", "parameters of "


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
    after: dict[str, int] = {}  # by device; a caller may change streams between two parts
    for stream, number in last.items():
        device = stream.rsplit(" ", 1)[1]
        after[device] = after.get(device, 0) | happened.before[number]
    recorded = {calls[number].what for number in first.values()}
    for stream in dict.fromkeys(call.stream for call in calls if not call.stream.startswith(("caller", "host"))):
        own = [number for number, call in enumerate(calls) if call.stream == stream]
        if not (calls[own[0]].kind == "wait" and calls[own[0]].what in recorded):
            found.append(f"{stream} does not wait for its caller first")
        works = [number for number in own if calls[number].kind == "run"]
        found += [f"no caller waits for {calls[number].what}" for number in works
                  if not after.get(calls[number].device, 0) >> number & 1]
    return found
