"""What the recorded calls of a rank on a GPU guarantee, proved against the plan.

As :mod:`pipec.runtime.stream_proof` for the streams of one process: from the calls follows what each piece of work
comes after, whatever the device does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipec.ir import FROM_HOST, TO_HOST, Kind, Plan
from pipec.races import orders_needed
from pipec.runtime.stream_api import Call
from pipec.runtime.stream_proof import Happened, input_problems, memory_problems

FREES = "frees "  # what is sent is held beside the plan's own buffers: proved by its own calls


def rank_problems(plan: Plan, calls: Sequence[Call], me: int) -> list[str]:
    """Everything that the calls of one part of a step of device ``me`` leave open; empty if they are right.

    Checked: every task runs once, in the plan's order, on the caller's stream; every transfer happens once, the ones on
    a wire in the plan's order; whoever reads a value comes after its transfer, and a transfer after what makes the
    value; memory goes back after all that use it; the host waits for no device on behalf of a transfer on a wire, and
    the part ends when all that was queued has ended.
    """
    happened = Happened(calls)
    wired = any(call.stream.startswith("wire ") for call in calls)
    found = part_problems(calls)
    at: dict[int, int] = {}
    for task, name, stream in _expected(plan, me, wired):
        own = [n for n, call in enumerate(calls) if call.kind == "run" and call.what == name and _on(call, stream)]
        if len(own) != 1:
            found.append(f"{name} runs {len(own)} times on {stream}, not once")
        else:
            at[task] = own[0]
    places = {call.what: n for n, call in enumerate(calls) if call.kind == "run"}
    tasks = {call.what: n for n, call in enumerate(calls) if call.kind == "run" and call.stream.startswith("caller")}
    copies = [task for task in at if plan.table.kind[task] == Kind.COPY]
    on_wire = [task for task in copies if wired and plan.table.device[task] != plan.table.peer[task]]
    for what, ids in (("tasks", _own(plan, me)), ("transfers", on_wire)):
        order = [at[task] for task in ids if task in at]
        if order != sorted(order):
            found.append(f"the {what} of device {me} are in another order than the plan's")
    names = [str(plan.table.task(task)) for task in range(len(plan.table))]
    for first, second, what in orders_needed(plan):
        if first in at and second in at and not what.startswith(FREES) and not happened.ordered(at[first], at[second]):
            found.append(f"{names[second]} {what} {names[first]}")
    for task, number in at.items():  # a transfer comes after the COPY that the rank's own list has
        if plan.table.kind[task] == Kind.COPY and plan.table.device[task] == me:
            if names[task] not in tasks:
                found.append(f"{names[task]} is not among the tasks of device {me}")
            elif not happened.ordered(tasks[names[task]], number):
                found.append(f"{names[task]} leaves before its task")
    found += _fetches(plan, happened, places, at, names, me) if wired else []
    found += input_problems(plan, happened, places, {task: n for task, n in at.items() if task not in copies}, names)
    return found


def _fetches(
    plan: Plan, happened: Happened, places: dict[str, int], at: dict[int, int], names: list[str], me: int
) -> Iterator[str]:
    """What goes from this rank's host memory to another rank's GPU comes by way of its own."""
    table = plan.table
    for task, number in at.items():
        if table.gradient[task] != FROM_HOST or table.device[task] != me or table.peer[task] == me:
            continue
        fetch = places.get(f"fetches {names[task]}")
        away = [at[one] for one in plan.waits.of(task).tolist() if one in at and table.gradient[one] == TO_HOST]
        if fetch is None or not happened.ordered(fetch, number):
            yield f"{names[task]} leaves before it is fetched from host memory"
        elif not all(happened.ordered(one, fetch) for one in away):
            yield f"{names[task]} is fetched from host memory before it is there"


def part_problems(calls: Sequence[Call]) -> list[str]:
    """What holds of any part of a run, also of an asynchronous one: memory, ends, and on a wire no host that waits."""
    wired = any(call.stream.startswith("wire ") for call in calls)
    waits = [f"the host waits for {call.what}" for call in calls if wired and call == Call("wait", "host", call.what)]
    return waits + memory_problems(calls) + _ends(calls, Happened(calls))


def _own(plan: Plan, me: int) -> list[int]:
    """Compute tasks of a device in the plan's order."""
    table = plan.table
    kinds = [Kind.COPY, Kind.UPDATE]
    return [task for task in range(len(table)) if table.device[task] == me and table.kind[task] not in kinds]


def _expected(plan: Plan, me: int, wired: bool) -> Iterator[tuple[int, str, str]]:
    """Task, its name, and the stream it belongs to."""
    table = plan.table
    for task in range(len(table)):
        name = str(table.task(task))
        if table.kind[task] == Kind.COPY and me in (table.device[task], table.peer[task]):
            if table.device[task] == table.peer[task]:
                yield task, name, f"{'out' if table.gradient[task] == TO_HOST else 'in'} {me}"
            elif table.gradient[task] == FROM_HOST and table.device[task] == me and not wired:
                continue  # from host to host
            elif wired:
                yield task, name, f"wire {me}-{table.peer[task] if table.device[task] == me else table.device[task]}"
            elif table.device[task] == me:
                yield task, name, f"out {me}"
            else:
                yield task, f"brings {name}", "caller"
        elif table.device[task] == me and table.kind[task] not in (Kind.COPY, Kind.UPDATE):
            yield task, name, "caller"


def _on(call: Call, stream: str) -> bool:
    return call.stream == stream or (stream == "caller" and call.stream.startswith("caller"))


def _ends(calls: Sequence[Call], happened: Happened) -> list[str]:
    """The last look of the host at the device comes after all work."""
    looks = [n for n, call in enumerate(calls) if call == Call("past", "host", call.what)]
    if not looks:
        return ["nobody looks whether the part has ended"]
    works = [n for n, call in enumerate(calls) if call.kind == "run" and n < looks[-1]]
    return [f"the part ends before {calls[n].what}" for n in works if not happened.ordered(n, looks[-1])]
