"""The simulator: when every task of a plan runs, and what lives meanwhile.

Lanes are in-order queues; a task starts when its lane is free and all it waits for has ended (copies: has
arrived). A COPY occupies the copy-out lane of its source and the copy-in lane of its target for bytes/bandwidth
and arrives ``latency`` later; one without transfer time occupies no lane. A COPY to or from host memory occupies one
lane, for bytes/host_bandwidth, and arrives ``host_latency`` later.

An overlap group is one task: it starts when all its members can, takes ``Costs.overlap`` x the sum of their durations,
and hands on what they make when it ends. Its members stand in it one after another, so that times add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from pipec.costs import Costs
from pipec.errors import PlanError, SpecError
from pipec.ir import BACKWARDS, FROM_HOST, TO_HOST, Buffer, Buffers, Kind, Lane, Plan, Table, arrives, sends
from pipec.rescaled import at
from pipec.timeline import Timeline

Floats = npt.NDArray[np.float64]


def durations(plan: Plan, costs: Costs) -> Floats:
    """Per task how long it occupies its lane, shape (tasks,)."""
    table, graph = plan.table, plan.graph
    by_stage = np.zeros((len(Kind), len(graph.stages) + 1))
    for number, stage in enumerate(graph.stages):
        for kind in Kind:
            by_stage[kind, number] = costs.duration(kind, stage.name)
        by_stage[Kind.REDUCE, number] = costs.reduce_duration(stage.name, plan.data_parallel)
    trained = sorted({int(s) for s in table.stage[np.isin(table.kind, BACKWARDS)]})
    by_stage[Kind.UPDATE, -1] = sum(by_stage[Kind.UPDATE, s] for s in trained)  # an UPDATE of all stages
    by_stage[: Kind.COPY] /= plan.slices
    made = by_stage[table.kind, table.stage]
    made[table.group > 0] *= costs.overlap
    hosted = table.gradient >= TO_HOST
    for bandwidth, of_host in ((costs.bandwidth, False), (costs.to_host()[0], True)):
        copies = np.flatnonzero((table.kind == Kind.COPY) & (hosted == of_host))
        if bandwidth is None or not len(copies):
            continue
        sizes = value_bytes(plan, costs)
        missing = [v.name for v, size in zip(graph.values, sizes, strict=True) if size is None]
        if missing:
            raise PlanError(
                f"costs give a bandwidth but no bytes for {', '.join(missing)}; set output_bytes of the stages or "
                "Costs(values=...), or profile the modules"
            )
        made[copies] = np.asarray(sizes, float)[table.value[copies]] / bandwidth / plan.slices
    return made


def value_bytes(plan: Plan, costs: Costs) -> list[int | None]:
    """Bytes per value for one microbatch, None where unknown."""
    return [costs.value_bytes(v.name, plan.graph.stages[v.producer].name) for v in plan.graph.values]


def simulate(plan: Plan, costs: Costs | None = None) -> Timeline:
    """Run ``plan`` on the clock of ``costs``.

    Raises:
        PlanError: the plan deadlocks, or a bandwidth is given without bytes.
        SpecError: the costs name an unknown stage, or are no Costs.
    """
    if costs is not None and not isinstance(costs, Costs):
        raise SpecError(f"simulate: costs must be pipec.Costs(...), got {type(costs).__name__} {costs!r}")
    costs = at(costs or plan.costs or Costs(), plan.minibatch)
    costs.check(plan.graph)
    duration = durations(plan, costs)
    start, end, cause = run_clock(plan, duration, costs)
    return Timeline(plan, costs, start, end, cause)


def run_clock(plan: Plan, duration: Floats, costs: Costs) -> tuple[Floats, Floats, npt.NDArray[np.int32]]:
    """Start, end and the task that each task's start depended on last (-1: none), in one sweep over the ids.

    ``costs``: for the latencies.
    """
    from pipec.verify import execution_order

    table, count = plan.table, len(plan.table)
    lane, peer_lane = table.device * 3, table.peer * 3 + int(Lane.IN)
    copy, hosted = table.kind == Kind.COPY, table.gradient >= TO_HOST
    lane = np.where(sends(table), lane + int(Lane.OUT), lane)
    lane = np.where(table.gradient == FROM_HOST, peer_lane, lane).tolist()
    second = np.where(arrives(table), peer_lane, -1)
    second = np.where(hosted, lane, second).tolist()  # both are the one that it occupies
    latency = np.where(copy, np.where(hosted, costs.to_host()[1], costs.latency), 0.0).tolist()
    spans = duration.tolist()
    bounds, ids = plan.waits.start.tolist(), plan.waits.ids.tolist()
    free, last = [0.0] * (3 * plan.devices), [-1] * (3 * plan.devices)
    starts, ends, arrive, cause = [0.0] * count, [0.0] * count, [0.0] * count, [-1] * count
    order = execution_order(plan)
    groups = _groups(plan, order)
    closing = {task: tasks[-1] for tasks in groups.values() for task in tasks}
    for task in order:
        members = groups.get(task)
        if members is None and task in closing:
            continue  # ran with the first of its group
        own, other, span = lane[task], second[task], spans[task]
        begin, why = 0.0, -1
        if other < 0 or span:
            begin, why = free[own], last[own]
            if other >= 0 and free[other] > begin:
                begin, why = free[other], last[other]
        needs = ids[bounds[task] : bounds[task + 1]]
        if members is not None:
            needs = [need for member in members for need in ids[bounds[member] : bounds[member + 1]]]
        for need in needs:
            if arrive[need] > begin or (why < 0 and arrive[need] >= begin):
                begin, why = arrive[need], closing.get(need, need)
        finish = begin + span
        starts[task], ends[task], cause[task] = begin, finish, why
        if members is not None:
            for before, member in pairwise(members):
                starts[member], cause[member] = finish, before
                ends[member] = finish = finish + spans[member]
            for member in members:
                arrive[member] = finish
        arrive[task] = finish
        if other < 0:
            free[own], last[own] = finish, task if members is None else members[-1]
        else:
            arrive[task] = finish + latency[task]
            if span:
                free[own], last[own] = finish, task
                free[other], last[other] = finish, task
    return np.asarray(starts), np.asarray(ends), np.asarray(cause, np.int32)


def _groups(plan: Plan, order: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Overlap groups by the first of their tasks; tuples of numbers, which the garbage collector does not follow."""
    found: dict[int, tuple[int, ...]] = {}
    if plan.table.group.any():
        numbers = plan.table.group.tolist()
        for task in order:
            if numbers[task]:
                found[numbers[task]] = (*found.get(numbers[task], ()), task)
    return {tasks[0]: tasks for tasks in found.values()}


def shares(plan: Plan) -> Floats:
    """Per stage its part of all that its device saves for one microbatch, shape (stages,)."""
    made = np.zeros(len(plan.graph.stages))
    for device in range(plan.devices):
        own = [chunk for chunk in plan.chunks if chunk.device == device]
        for chunk in own:
            made[list(chunk.stages)] = 1.0 / (len(own) * len(chunk.stages))
    return made


def buffer_bytes(plan: Plan, costs: Costs) -> Floats | None:
    """Bytes per buffer, shape (buffers,), or None when any size is unknown.

    What a stage gives away and its own graph saves as well (``Costs.saved_values``) lives as long as the graph: it
    is charged to the activation, and not a second time to the value at its producer, unless a RECOMPUTE makes the
    saved one anew.
    """
    stages, names = plan.graph.stages, [value.name for value in plan.graph.values]
    values, kept = value_bytes(plan, costs), [costs.saved_values.get(name, 0) for name in names]
    saved = [costs.activation_bytes(stage.name) for stage in stages]
    own = [sum(kept[v] for v in stage.gives) for stage in stages]
    carried = [costs.carry_bytes(stage.name) for stage in stages]
    sizes: dict[Buffer, list[int | None]] = dict.fromkeys(Buffer, values) | {
        Buffer.ACTIVATION: [None if s is None else s + more for s, more in zip(saved, own, strict=True)],
        Buffer.GRADIENT: [None if v is None else costs.gradients.get(n, v) for n, v in zip(names, values, strict=True)],
        Buffer.WEIGHT: [costs.weight_bytes(stage.name) for stage in stages],
        Buffer.CARRY: carried, Buffer.CARRY_GRADIENT: carried,
    }
    width = max(len(stages), len(values))
    flat = [size for kind in Buffer for size in [*sizes[kind], *[0] * (width - len(sizes[kind]))]]
    key = plan.buffers.kind.astype(np.int64) * width + plan.buffers.ref
    if any(flat[number] is None for number in np.unique(key).tolist()):
        return None
    made = np.asarray([size or 0 for size in flat], float)[key]
    return np.asarray((made - _counted_twice(plan, np.asarray([*kept, 0], float))) / plan.slices)


def later_bytes(plan: Plan, costs: Costs, weights: Floats) -> tuple[npt.NDArray[np.int64], Floats]:
    """What is left of an activation between the halves of a split backward.

    Args:
        weights: :func:`buffer_bytes`.

    Returns:
        Per buffer the BACKWARD_INPUT after which it changes, -1 where none does, and its bytes from the end of that on.
    """
    buffers, table = plan.buffers, plan.table
    items = plan.microbatches * plan.slices * plan.replicas
    halves = np.full((len(plan.graph.stages), items), -1, np.int64)
    ids = np.flatnonzero(table.kind == Kind.BACKWARD_INPUT)
    halves[table.stage[ids], _item(plan, table)[ids]] = ids
    left = [costs.weight_activation_bytes(stage.name) for stage in plan.graph.stages]
    known = np.asarray([size is not None for size in left] + [False])
    sizes = np.asarray([size or 0 for size in left] + [0], float)
    stage = np.where(buffers.kind == Buffer.ACTIVATION, buffers.ref, -1)
    changes = known[stage]
    half = np.where(changes, halves[np.where(changes, stage, 0), _item(plan, buffers)], -1)
    return half, np.where(half >= 0, sizes[stage] / plan.slices, weights)


def _item(plan: Plan, rows: Table | Buffers) -> npt.NDArray[np.int64]:
    return np.asarray((rows.replica * plan.slices + rows.slice) * plan.microbatches + rows.microbatch, np.int64)


def _counted_twice(plan: Plan, kept: Floats) -> Floats:
    """Per buffer the bytes of a value at its producer that the producer's graph holds already."""
    buffers, kinds = plan.buffers, plan.table.kind
    writer = kinds[buffers.writer]
    item = _item(plan, buffers)
    held = np.zeros((len(plan.graph.stages), plan.microbatches * plan.slices * plan.replicas), bool)
    graph = (buffers.kind == Buffer.ACTIVATION) & (writer == Kind.FORWARD)
    held[buffers.ref[graph], item[graph]] = True
    producer = np.asarray([v.producer for v in plan.graph.values] + [0])
    home = (buffers.kind == Buffer.VALUE) & (writer == Kind.FORWARD)
    ref = np.where(home, buffers.ref, -1)
    return np.where(home & held[producer[ref], item], kept[ref], 0.0)
