"""Form: every number in a plan names something that exists, and every task stands in the lanes it belongs to.

The invariants index by these numbers, so they are looked at only in a plan of the right form.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from pipec.columns import OF_STAGES
from pipec.errors import PlanError, Problem, raise_all
from pipec.ir import BUFFER_COLUMNS, CARRIED, TABLE_COLUMNS, TO_HOST, Buffer, Kind, Lane, Plan, arrives, sends
from pipec.segments import first_stages
from pipec.verify.facts import some

MOST = 24  # problems shown in one error
BIG = int(np.iinfo(np.int32).max)


def form(plan: Plan) -> list[str]:
    """What is malformed: unknown stages, devices, values, tasks; tasks missing from a lane or standing twice."""
    found = list(_graph(plan)) or list(_table(plan))
    return found or [*_lanes(plan), *_waits(plan), *_buffers(plan)]


def check_form(plan: Plan) -> None:
    """Raise PlanError listing what :func:`form` finds: what was read from outside can only be used without it."""
    raise_all(f"plan {plan.graph.name!r}", [Problem(f"form: {text}") for text in form(plan)], PlanError, most=MOST)


def lane_name(lane: int) -> str:
    return ("compute", "copy-out", "copy-in")[lane]


def _graph(plan: Plan) -> Iterator[str]:
    stages = len(plan.graph.stages)
    for number, value in enumerate(plan.graph.values):
        if not 0 <= value.producer < stages or any(not value.producer < r < stages for r in value.readers):
            yield (
                f"value v{number} goes from stage {value.producer} to {_list(value.readers)}, but a value "
                f"goes from one of the stages 0..{stages - 1} to later ones"
            )
        if not {*value.skips, *value.host} <= set(value.readers):
            yield f"value v{number} is marked as a skip to {_list(value.skips + value.host)}, which do not all read it"
    reads: dict[int, list[int]] = defaultdict(list)
    gives: dict[int, list[int]] = defaultdict(list)
    for number, value in enumerate(plan.graph.values):
        gives[value.producer].append(number)
        for reader in value.readers:
            reads[reader].append(number)
    for number, stage in enumerate(plan.graph.stages):
        if list(stage.reads) != reads[number] or list(stage.gives) != gives[number]:
            yield f"stage {number} does not read and give the values that name it"
    if any(not 0 <= r < stages for item in plan.graph.inputs for r in item.readers):
        yield f"an input is read by a stage that is none of 0..{stages - 1}"
    items = plan.microbatches * plan.slices * plan.replicas
    if items > len(plan.table):
        yield f"the plan has {items} microbatches, slices and replicas, but only {len(plan.table)} tasks"
    if plan.microbatches % plan.minibatches or plan.excerpt:
        yield (
            f"the plan has {plan.microbatches} microbatches in {plan.minibatches} minibatches, but minibatches are "
            "equal and a plan without a weight rule has one; the plan of a measured asynchronous step is an excerpt, "
            "not a plan of its own"
        )
    yield from _behind(plan)
    firsts = first_stages(plan.recompute)
    if (list(firsts) != sorted({0, *firsts}) and firsts) or any(first >= stages for first in firsts):
        yield f"the plan recomputes {plan.recompute!r}, but segments begin at stage 0 and go on with later ones"
    placed = sorted(stage for chunk in plan.chunks for stage in chunk.stages)
    if placed != list(range(stages)):
        yield f"the chunks hold the stages {_list(placed)}, but each of 0..{stages - 1} belongs in one"
    for chunk in plan.chunks:
        if not 0 <= chunk.device < plan.devices:
            yield f"chunk {chunk.index} is on device {chunk.device}; the devices are 0..{plan.devices - 1}"


def _behind(plan: Plan) -> Iterator[str]:
    left = f"behind={','.join(map(str, plan.behind))[:60]}"
    if plan.behind and not plan.asynchronous:
        yield f"the plan says {left}, but only an asynchronous plan has steps that leave tasks to the next"
    elif plan.behind and len(plan.behind) != plan.devices:
        yield f"the plan says {left}, but that is one number of tasks for each of its {plan.devices} devices"
    elif plan.behind:
        device, kind = plan.table.device, plan.table.kind
        own = [int(((device == d) & (kind != Kind.COPY)).sum()) for d in range(plan.devices)]
        if any(not 0 <= count <= most for count, most in zip(plan.behind, own, strict=True)):
            yield f"the plan says {left}, but its devices have {_list(own)} tasks that a step could leave to the next"


def _table(plan: Plan) -> Iterator[str]:
    table = plan.table
    if len({len(getattr(table, name)) for name in TABLE_COLUMNS}) > 1:
        yield "the columns of the task table differ in length"
        return
    wrong = np.flatnonzero((table.kind < 0) | (table.kind >= len(Kind)))
    if len(wrong):
        yield from some(wrong, (f"task %{i} has the unknown kind {table.kind[i]}" for i in wrong.tolist()))
        return
    copy, update = table.kind == Kind.COPY, table.kind == Kind.UPDATE
    limits = (
        ("stage", np.where(update, -1, 0), len(plan.graph.stages)),
        ("microbatch", 0, np.where(update, BIG, plan.microbatches)),
        ("slice", 0, plan.slices),
        ("replica", 0, plan.replicas),
        ("version", 0, BIG),
        ("group", 0, BIG),
        ("device", 0, plan.devices),
        ("peer", np.where(copy, 0, -1), np.where(copy, plan.devices, 0)),
        ("gradient", 0, np.where(copy, CARRIED, 1)),
        ("value", np.where(copy, 0, -1), np.where(copy, len(plan.graph.values), 0)),
    )
    for name, least, beyond in limits:
        column = getattr(table, name)
        low, high = np.broadcast_to(least, column.shape), np.broadcast_to(beyond, column.shape)
        wrong = np.flatnonzero((column < low) | (column >= high))
        yield from some(wrong, (
            f"task %{i} ({table.task(i)}) has {name} {column[i]}; it must lie in {low[i]}..{high[i] - 1}"
            for i in wrong.tolist()
        ))
    hosted = copy & (table.gradient >= TO_HOST)
    wrong = np.flatnonzero((table.gradient == TO_HOST) & copy & (table.device != table.peer))
    yield from some(wrong, (
        f"task %{i} ({table.task(i)}) goes to host memory with the peer {table.peer[i]}; it names its own device, "
        f"{table.device[i]}" for i in wrong.tolist()
    ))
    wrong = np.flatnonzero(copy & ~hosted & (table.device == table.peer))
    yield from some(wrong, (
        f"task %{i} ({table.task(i)}) copies from device {table.device[i]} to itself" for i in wrong.tolist()
    ))


def _lanes(plan: Plan) -> Iterator[str]:
    table, size = plan.table, len(plan.table)
    if len(plan.lanes) != plan.devices or any(len(lanes) != len(Lane) for lanes in plan.lanes):
        yield f"the plan has lanes for {len(plan.lanes)} devices, but {plan.devices} devices"
        return
    copy, out = table.kind == Kind.COPY, sends(table)
    homes = (np.where(out | copy, -1, table.device), np.where(out, table.device, -1),
             np.where(arrives(table), table.peer, -1))
    for lane, home in zip(Lane, homes, strict=True):
        times = np.zeros(size, np.int64)  # how often each task stands in a lane of this kind on its own device
        for device, lanes in enumerate(plan.lanes):
            where = f"the {lane_name(lane)} lane of device {device}"
            ids = lanes[lane]
            outside = ids[(ids < 0) | (ids >= size)]
            if len(outside):
                yield f"{where} holds %{outside[0]}, but the tasks are %0..%{size - 1}"
                times += home == device  # the others are not told on top
                continue
            at_home = home[ids] == device
            np.add.at(times, ids[at_home], 1)
            strays = np.unique(ids[~at_home])
            yield from some(strays, (
                f"{table.task(i)} (%{i}) does not belong in {where}" for i in strays.tolist()
            ))
        for wrong, what in (((home >= 0) & (times == 0), "is missing from"), (times > 1, "stands twice in")):
            rows = np.flatnonzero(wrong)
            yield from some(rows, (
                f"{table.task(i)} (%{i}) {what} the {lane_name(lane)} lane of device {home[i]}" for i in rows.tolist()
            ))


def _waits(plan: Plan) -> Iterator[str]:
    start, ids, size = plan.waits.start, plan.waits.ids, len(plan.table)
    if len(start) != size + 1 or start[0] != 0 or start[-1] != len(ids) or (np.diff(start) < 0).any():
        yield "the table of waits does not fit the tasks"
        return
    tasks = np.repeat(np.arange(size), np.diff(start))
    wrong = np.flatnonzero((ids < 0) | (ids >= size) | (ids == tasks))
    yield from some(wrong, (
        f"{plan.table.task(int(tasks[k]))} (%{tasks[k]}) waits for %{ids[k]}, which is "
        + ("itself" if ids[k] == tasks[k] else "no task")
        for k in wrong.tolist()
    ))


def _buffers(plan: Plan) -> Iterator[str]:
    buffers, size = plan.buffers, len(plan.table)
    if len({len(getattr(buffers, name)) for name in BUFFER_COLUMNS}) > 1:
        yield "the columns of the table of buffers differ in length"
        return
    refs = np.where(np.isin(buffers.kind, OF_STAGES), len(plan.graph.stages), len(plan.graph.values))
    limits = {"kind": len(Buffer), "ref": refs, "replica": plan.replicas, "microbatch": plan.microbatches,
              "slice": plan.slices, "device": plan.devices, "writer": size, "free": size}
    bad = np.zeros(len(buffers), bool)
    for name, high in limits.items():
        column = getattr(buffers, name)
        bad |= (column < 0) | (column >= high)
    wrong = np.flatnonzero(bad)
    yield from some(wrong, (
        f"buffer {i} (written by %{buffers.writer[i]}, freed by %{buffers.free[i]}) names a stage, value, "
        "microbatch, device or task that is not there"
        for i in wrong.tolist()
    ))


def _list(numbers: Sequence[int]) -> str:
    text = ", ".join(map(str, numbers)) or "none"
    return text if len(text) <= 60 else text[:57] + "..."
