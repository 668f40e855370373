"""Every invariant holds for every compiled plan, and every way to break one is found under its name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import ancestors, any_order, needs, pipeline, plans, unet

import pipec
from pipec.ir import Buffer, Kind, Lane, Plan, Table, Waits
from pipec.verify import INVARIANTS, execution_order
from pipec.verify.reach import Reach

MODES = [
    {"schedule": schedule, "recompute": recompute, "update": update}
    for schedule in ("gpipe", "1f1b", any_order(3, split=True))
    for recompute in ("never", "except_last", "always")
    for update in (None, "stage", "all")
]


def broken(plan: Plan, **options: Any) -> dict[str, list[str]]:
    """The problems that verify finds, by invariant."""
    try:
        plan.verify(**options)
    except pipec.PlanError as error:
        found: dict[str, list[str]] = {}
        name = ""
        for line in str(error).splitlines()[1:]:
            if match := re.fullmatch(r"  \d+\. (\w+): (.*)", line):
                name = match[1]
                found.setdefault(name, []).append(match[2])
            elif name:
                found[name][-1] += "\n" + line
        return found
    return {}


def row(plan: Plan, token: str) -> int:
    """The id of the task that prints as ``token``."""
    return next(i for i in range(len(plan)) if str(plan.table.task(i)) == token)


def set_column(plan: Plan, name: str, task: int, value: int) -> Plan:
    column = getattr(plan.table, name).copy()
    column[task] = value
    return evolve(plan, table=evolve(plan.table, **{name: column}))


def set_buffer(plan: Plan, name: str, buffer: int, value: int) -> Plan:
    column = getattr(plan.buffers, name).copy()
    column[buffer] = value
    return evolve(plan, buffers=evolve(plan.buffers, **{name: column}))


def buffer_of(plan: Plan, token: str, device: int) -> int:
    return next(i for i in range(len(plan.buffers))
                if plan.buffers.token(i) == token and plan.buffers.device[i] == device)


def take_buffers(plan: Plan, rows: Any) -> Plan:
    from pipec.ir import BUFFER_COLUMNS, Buffers

    return evolve(plan, buffers=Buffers(*(getattr(plan.buffers, name)[rows] for name in BUFFER_COLUMNS)))


def waits_of(edges: list[tuple[int, int]], size: int) -> Waits:
    edges = sorted(set(edges))
    start = np.searchsorted([task for task, _ in edges], np.arange(size + 1))
    return Waits(start, [need for _, need in edges])


def edges_of(plan: Plan) -> list[tuple[int, int]]:
    return [(task, int(need)) for task in range(len(plan)) for need in plan.waits.of(task)]


def without_wait(plan: Plan, task: int, need: int) -> Plan:
    edges = [edge for edge in edges_of(plan) if edge != (task, need)]
    return evolve(plan, waits=waits_of(edges, len(plan)))


def drop(plan: Plan, task: int) -> Plan:
    """The plan without one task, the buffers it wrote or freed, and the waits on it."""
    keep = np.flatnonzero(np.arange(len(plan)) != task)
    new = np.cumsum(np.arange(len(plan)) != task) - 1
    lanes = tuple(tuple(new[ids[ids != task]].astype(np.int32) for ids in lanes) for lanes in plan.lanes)
    edges = [(int(new[a]), int(new[b])) for a, b in edges_of(plan) if task not in (a, b)]
    alive = np.flatnonzero((plan.buffers.writer != task) & (plan.buffers.free != task))
    plan = take_buffers(plan, alive)
    buffers = evolve(plan.buffers, writer=new[plan.buffers.writer], free=new[plan.buffers.free])
    return evolve(plan, table=plan.table.take(keep), lanes=lanes, waits=waits_of(edges, len(keep)), buffers=buffers)


def repeat(plan: Plan, task: int) -> Plan:
    """The plan with one task standing a second time, at the end of its lanes."""
    rows = np.append(np.arange(len(plan)), task)
    table, size = plan.table.take(rows), len(plan)
    lanes = tuple(
        tuple(np.append(ids, size).astype(np.int32) if task in ids else ids for ids in lanes) for lanes in plan.lanes
    )
    return evolve(plan, table=table, lanes=lanes, waits=waits_of(edges_of(plan), size + 1))


def swap(plan: Plan, device: int, lane: Lane, first: int, second: int) -> Plan:
    """The plan with two tasks of a lane in each other's place."""
    ids = plan.lanes[device][lane].copy()
    a, b = np.flatnonzero(ids == first)[0], np.flatnonzero(ids == second)[0]
    ids[[a, b]] = ids[[b, a]]
    lanes = list(plan.lanes[device])
    lanes[lane] = ids
    return evolve(plan, lanes=(*plan.lanes[:device], tuple(lanes), *plan.lanes[device + 1 :]))


# -- no false alarm --------------------------------------------------------------------------------------------


@given(plans())
@settings(max_examples=150)
def test_every_compiled_plan_holds(plan: Plan) -> None:
    report = plan.verify()
    held = {f.invariant for f in report.findings if f.unchecked is None}
    assert held >= {"form", "tasks", "order", "progress", "waits", "lifetimes", "copies", "versions"}


@given(plans(), st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_ids_need_not_be_an_order(plan: Plan, rng: Any) -> None:
    """The same plan with its tasks numbered at random holds as well, and gets an execution order."""
    new = list(range(len(plan)))
    rng.shuffle(new)
    mapped = np.asarray(new)
    shuffled = evolve(
        plan,
        table=plan.table.take(np.argsort(mapped)),
        lanes=tuple(tuple(mapped[ids].astype(np.int32) for ids in lanes) for lanes in plan.lanes),
        waits=waits_of([(int(mapped[a]), int(mapped[b])) for a, b in edges_of(plan)], len(plan)),
        buffers=evolve(plan.buffers, writer=mapped[plan.buffers.writer], free=mapped[plan.buffers.free]),
    )
    shuffled.verify()
    order = list(execution_order(shuffled))
    assert sorted(order) == list(range(len(plan)))
    place = {task: at for at, task in enumerate(order)}
    assert all(place[need] < place[task] for task, before in enumerate(needs(shuffled)) for need in before)
    assert shuffled.simulate().makespan == pytest.approx(plan.simulate().makespan)


def test_a_compiled_plan_runs_in_the_order_of_its_ids() -> None:
    plan = pipec.compile(pipec.chain(2), 2, 2)
    assert execution_order(plan) == range(len(plan))


def test_report_prints() -> None:
    report = pipec.compile(pipec.chain(2), 2, 2, update="stage", update_early=True).verify()
    assert str(report) == "\n".join([
        "plan 'chain'",
        "  form: holds",
        "  tasks: holds",
        "  order: holds",
        "  progress: holds",
        "  waits: holds",
        "  lifetimes: holds",
        "  copies: holds",
        "  versions: holds",
        "  memory: not checked: no memory limit is given",
        "  updates: not checked: the plan updates each stage early, so nothing may need all gradients at once",
    ])
    assert report["waits"].unchecked is None
    with pytest.raises(pipec.PlanError, match="no invariant is named 'speed'; they are form, tasks"):
        report["speed"]


# -- waits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES, ids=lambda m: "-".join(getattr(v, "__name__", str(v)) for v in m.values()))
def test_every_wait_that_matters_is_missed(mode: dict[str, Any]) -> None:
    """A wait matters when no other path leads from the awaited task; then verify names what lacks it."""
    plan = pipec.compile(unet(), 3, 3, placement=[0, 1, 2, 1, 0], **mode)
    mattering = 0
    for task, need in edges_of(plan):
        mutant = without_wait(plan, task, need)
        matters = need not in ancestors(needs(mutant), task)
        found = broken(mutant)
        assert bool(found) == matters, (str(plan.table.task(task)), str(plan.table.task(need)))
        assert set(found) <= {"waits", "lifetimes", "updates", "tasks", "order"}
        mattering += matters
    assert mattering > 10


@given(plans(), st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_any_removed_wait_is_found_when_it_matters(plan: Plan, rng: Any) -> None:
    edges = edges_of(plan)
    for task, need in rng.sample(edges, min(len(edges), 6)):
        mutant = without_wait(plan, task, need)
        assert bool(broken(mutant)) == (need not in ancestors(needs(mutant), task))


@given(plans())
@settings(max_examples=40)
def test_reach_agrees_with_a_search(plan: Plan) -> None:
    reach, before = Reach(plan), needs(plan)
    size = len(plan)
    truth = np.zeros((size, size), bool)
    for task in range(size):
        truth[list(ancestors(before, task)), task] = True
    first, second = np.divmod(np.arange(size * size), size)
    assert np.array_equal(reach.proved(first, second), truth.ravel())
    assert np.array_equal(reach._by_clock(first, second), truth.ravel())
    assert not (reach._by_wait(first, second) & ~truth.ravel()).any()


def test_missing_wait_says_who_reads_what() -> None:
    plan = pipec.compile(pipec.chain(2), 2, 1)
    task, need = row(plan, "1F0"), row(plan, "v0[0]:0>1")
    assert broken(without_wait(plan, task, need))["waits"] == [
        "1F0 (stage 's1', device 1) reads a value but does not wait for v0[0]:0>1 (value 's0'), which brings it"
    ]


# -- one mutation after another ----------------------------------------------------------------------------------

Mutation = Callable[[Plan], Plan]


def double_activation(plan: Plan) -> Plan:
    """A second recompute of 0,0, and its activations beside the first ones."""
    plan = repeat(plan, row(plan, "0R0"))
    rows = np.append(np.arange(len(plan.buffers)), buffer_of(plan, "a0[0]", 0))
    return take_buffers(plan, rows)


def move(plan: Plan, token: str, device: int) -> Plan:
    """A task on the end of another device's compute lane."""
    task, old = row(plan, token), int(plan.table.device[row(plan, token)])
    lanes = [list(lanes) for lanes in plan.lanes]
    lanes[old][0] = lanes[old][0][lanes[old][0] != task]
    lanes[device][0] = np.append(lanes[device][0], task).astype(np.int32)
    return set_column(evolve(plan, lanes=tuple(map(tuple, lanes))), "device", task, device)


MUTATIONS: list[tuple[str, str, dict[str, Any], Mutation, str]] = [
    ("forward dropped", "tasks", {}, lambda p: drop(p, row(p, "1F1")), r"1F1 \(stage 's1', device 0\) is missing"),
    ("backward dropped", "tasks", {}, lambda p: drop(p, row(p, "2B0")), r"2B0 \(stage 's2', device 1\) is missing"),
    ("half dropped", "tasks", {"schedule": any_order(1, True)},
     lambda p: drop(p, int(np.flatnonzero(p.table.kind == Kind.BACKWARD_WEIGHT)[0])), "is missing, the other half"),
    ("other half dropped", "tasks", {"schedule": any_order(1, True)},
     lambda p: drop(p, int(np.flatnonzero(p.table.kind == Kind.BACKWARD_INPUT)[0])), "is missing, the other half"),
    ("forward twice", "tasks", {}, lambda p: repeat(p, row(p, "0F0")), "0F0 .* stands more than once"),
    ("whole and half", "tasks", {}, lambda p: set_column(repeat(p, row(p, "0B0")), "kind", len(p), 4),
     "0B0 .* stands whole and in halves"),
    ("task on another device", "tasks", {}, lambda p: move(p, "0B2", 1),
     "0B2 stands on device 1, but its stage 's0' is on device 0"),
    ("update dropped", "tasks", {"update": "stage"}, lambda p: drop(p, row(p, "2U0")),
     "the UPDATE of stage 's2' is missing"),
    ("update twice", "tasks", {"update": "all"}, lambda p: repeat(p, row(p, "U0")),
     "the UPDATE of all stages stands 2 times"),
    ("update undeclared", "tasks", {"update": "all"}, lambda p: evolve(p, update=None),
     r"U0 \(all stages, device 0\) is there, but the plan declares no update"),
    ("update of another kind", "tasks", {"update": "all"}, lambda p: evolve(p, update="stage"),
     "U0 .* is there, but update='stage' has no use for it"),
    ("update unknown", "tasks", {}, lambda p: evolve(p, update="often"), "declares update='often'"),
    ("update before its backward", "tasks", {"update": "stage", "update_early": True},
     lambda p: swap(p, 1, Lane.COMPUTE, row(p, "2U0"), row(p, "2B2")), "2U0 .* does not wait for 2B2"),
    ("recompute without backward", "tasks", {"recompute": "always", "forward_only": True},
     lambda p: set_column(repeat(p, row(p, "0F0")), "kind", len(p), 1), "0R0 .* without a backward to recompute for"),
    ("backward before forward", "order", {}, lambda p: swap(p, 1, Lane.COMPUTE, row(p, "3F0"), row(p, "3B0")),
     "3B0 .* stands before its forward 3F0"),
    ("recompute before forward", "order", {"recompute": "always"},
     lambda p: swap(p, 0, Lane.COMPUTE, row(p, "0F2"), row(p, "0R0")), "0F2|0R0"),
    ("backward before recompute", "order", {"recompute": "always"},
     lambda p: swap(p, 1, Lane.COMPUTE, row(p, "2R0"), row(p, "2B0")), "2B0 .* stands before its recompute 2R0"),
    ("weight half before input half", "order", {"schedule": any_order(1, True)},
     lambda p: swap(p, 1, Lane.COMPUTE, row(p, "3I1"), row(p, "3W1")), "3W1 .* stands before its input half 3I1"),
    ("recompute twice", "order", {"recompute": "always"}, double_activation,
     "the activations of stage 's0', microbatch 0, are held 2 times; one copy is enough"),
    ("lanes cross", "progress", {}, lambda p: swap(p, 1, Lane.COMPUTE, row(p, "3F0"), row(p, "3B0")),
     "device 1 compute stands at 3B0"),
    ("receives cross sends", "progress", {"schedule": "gpipe"},
     lambda p: swap(p, 1, Lane.IN, row(p, "v1[0]:0>1"), row(p, "v1[1]:0>1")),
     r"device 1 copy-in stands at v1\[1\]:0>1, which waits for its turn on the other lane"),
    ("wait on what comes later", "progress", {},
     lambda p: evolve(p, waits=waits_of([*edges_of(p), (row(p, "0F0"), row(p, "3B2"))], len(p))),
     r"device 0 compute stands at 0F0, which waits for 3B2 \(device 1\)"),
    ("copy waits for nothing", "waits", {},
     lambda p: without_wait(p, row(p, "v1[0]:0>1"), row(p, "1F0")), r"v1\[0\]:0>1 .* does not wait for 1F0"),
    ("gradient unawaited", "waits", {}, lambda p: without_wait(p, row(p, "1B0"), row(p, "dv1[0]:1>0")),
     r"1B0 .* needs a gradient but does not wait for dv1\[0\]:1>0 \(gradient of value 's1'\)"),
    ("freed early", "lifetimes", {},
     lambda p: set_buffer(p, "free", buffer_of(p, "v1[0]", 1), row(p, "2F0")),
     r"2F0 .* frees v1 on device 1 but does not wait for its reader 2B0"),
    ("activation freed by its forward", "lifetimes", {},
     lambda p: set_buffer(p, "free", buffer_of(p, "a0[1]", 0), row(p, "0F1")),
     r"0F1 .* frees a0 on device 0 but does not wait for its reader 0B1"),
    ("freed before it is sent", "lifetimes", {},
     lambda p: set_buffer(p, "free", buffer_of(p, "v1[1]", 0), row(p, "1F1")),
     r"1F1 .* frees v1 on device 0 but does not wait for its reader v1\[1\]:0>1"),
    ("freed elsewhere", "lifetimes", {},
     lambda p: set_buffer(p, "free", buffer_of(p, "v0[1]", 0), row(p, "3B2")),
     r"v0\[1\] lives on device 0 but is freed by 3B2"),
    ("written by another", "lifetimes", {},
     lambda p: set_buffer(p, "writer", buffer_of(p, "a2[1]", 1), row(p, "2F0")),
     r"a2\[1\] \(activations of stage 's2'\) on device 1 begins its life in 2F0 .* which does not write it"),
    ("buffer dropped", "lifetimes", {}, lambda p: take_buffers(p, np.arange(1, len(p.buffers))), "has no buffer on"),
    ("buffer twice", "lifetimes", {},
     lambda p: take_buffers(p, np.append(np.arange(len(p.buffers)), buffer_of(p, "v1[0]", 1))),
     r"v1\[0\] lives more than once on device 1"),
    ("buffer of nothing", "lifetimes", {},
     lambda p: set_buffer(take_buffers(p, np.append(np.arange(len(p.buffers)), buffer_of(p, "v0[0]", 0))),
                          "device", len(p.buffers), 1),
     r"device 1 holds v0\[0\], which nothing there needs"),
    ("copy dropped", "copies", {}, lambda p: drop(p, row(p, "v1[2]:0>1")), r"the copy v1\[2\]:0>1 of value 's1' is missing"),
    ("gradient copy dropped", "copies", {}, lambda p: drop(p, row(p, "dv1[2]:1>0")),
     r"the copy dv1\[2\]:1>0 of the gradient of value 's1' is missing"),
    ("copy twice", "copies", {}, lambda p: repeat(p, row(p, "v1[2]:0>1")), r"v1\[2\]:0>1 .* stands more than once"),
    ("copy of another value", "copies", {}, lambda p: set_column(p, "value", row(p, "v1[2]:0>1"), 0),
     r"v0\[2\]:0>1 .* is there, but nothing on device 1 needs it"),
    ("copy under another stage", "copies", {}, lambda p: set_column(p, "stage", row(p, "v1[2]:0>1"), 0),
     r"v1\[2\]:0>1 .* is listed under stage 0, which does not make the value"),
    ("sends in another order", "copies", {"schedule": "gpipe"},
     lambda p: swap(p, 1, Lane.IN, row(p, "v1[0]:0>1"), row(p, "v1[1]:0>1")),
     r"device 0 sends v1\[0\]:0>1 where device 1 receives v1\[1\]:0>1"),
    ("version from the future", "versions", {}, lambda p: set_column(p, "version", row(p, "2F1"), 1),
     "2F1 .* reads weight version 1, but no updates of its stage stand before it"),
    ("version gone", "versions", {"update": "stage"}, lambda p: swap(p, 1, Lane.COMPUTE, row(p, "3F0"), row(p, "3U0")),
     "reads weight version 0 after 1 update of its stage"),
    ("update before others' gradients", "updates", {"update": "stage"},
     lambda p: without_wait(p, row(p, "2U0"), row(p, "0B2")), "2U0 .* does not wait for 0B2"),
    ("one update before others' gradients", "updates", {"update": "all", "placement": [1, 1, 0, 0]},
     lambda p: without_wait(p, row(p, "U0"), row(p, "0B2")), "U0 .* does not wait for 0B2"),
    ("early without saying so", "updates", {"update": "stage", "update_early": True},
     lambda p: evolve(p, update_early=False), "U0 .* does not wait for"),
    ("unknown stage", "form", {}, lambda p: set_column(p, "stage", 0, 9), "has stage 9; it must lie in 0..3"),
    ("unknown device", "form", {}, lambda p: set_column(p, "device", 0, 2), "has device 2; it must lie in 0..1"),
    ("unknown kind", "form", {}, lambda p: set_column(p, "kind", 0, 11), "task %0 has the unknown kind 11"),
    ("copy to itself", "form", {}, lambda p: set_column(p, "peer", row(p, "v1[0]:0>1"), 0),
     "copies from device 0 to itself"),
    ("task in no lane", "form", {},
     lambda p: evolve(p, lanes=((p.lanes[0][0][1:], *p.lanes[0][1:]), p.lanes[1])),
     r"0F0 \(%0\) is missing from the compute lane of device 0"),
    ("task twice in a lane", "form", {},
     lambda p: evolve(p, lanes=((np.append(p.lanes[0][0], 0).astype(np.int32), *p.lanes[0][1:]), p.lanes[1])),
     r"0F0 \(%0\) stands twice in the compute lane of device 0"),
    ("task in another's lane", "form", {},
     lambda p: evolve(p, lanes=(p.lanes[0], (np.append(p.lanes[1][0], 0).astype(np.int32), *p.lanes[1][1:]))),
     r"0F0 \(%0\) does not belong in the compute lane of device 1"),
    ("no such task in a lane", "form", {},
     lambda p: evolve(p, lanes=((np.append(p.lanes[0][0], 999).astype(np.int32), *p.lanes[0][1:]), p.lanes[1])),
     "the compute lane of device 0 holds %999"),
    ("lanes of another number of devices", "form", {}, lambda p: evolve(p, lanes=p.lanes[:1]), "lanes for 1 devices"),
    ("wait on nothing", "form", {}, lambda p: evolve(p, waits=waits_of([(1, 999)], len(p))), "waits for %999"),
    ("wait on itself", "form", {}, lambda p: evolve(p, waits=waits_of([(1, 1)], len(p))), "which is itself"),
    ("waits of another plan", "form", {}, lambda p: evolve(p, waits=waits_of([], 3)), "does not fit the tasks"),
    ("buffer of no task", "form", {}, lambda p: set_buffer(p, "free", 0, 999), "that is not there"),
    ("ragged table", "form", {}, lambda p: evolve(p, table=evolve(p.table, group=[0])), "differ in length"),
    ("ragged buffers", "form", {}, lambda p: evolve(p, buffers=evolve(p.buffers, free=[0])), "differ in length"),
    ("chunks lack a stage", "form", {}, lambda p: evolve(p, chunks=p.chunks[:1]),
     "the chunks hold the stages 0, 1, but each of 0..3 belongs in one"),
    ("chunk on no device", "form", {},
     lambda p: evolve(p, chunks=(p.chunks[0], evolve(p.chunks[1], device=7))), "chunk 1 is on device 7"),
    ("value that runs backwards", "form", {},
     lambda p: evolve(p, graph=evolve(p.graph, values=(evolve(p.graph.values[0], readers=(0,)),
                                                       *p.graph.values[1:]))),
     "value v0 goes from stage 0 to 0"),
]


@pytest.mark.parametrize(("invariant", "options", "mutate", "message"), [m[1:] for m in MUTATIONS],
                         ids=[m[0].replace(" ", "-") for m in MUTATIONS])
def test_mutations_are_found(invariant: str, options: dict[str, Any], mutate: Mutation, message: str) -> None:
    plan = pipec.compile(pipec.chain(4), 2, 3, **options)
    assert broken(plan) == {}
    found = broken(mutate(plan))
    assert invariant in found, found
    assert re.search(message, "\n".join(found[invariant])), found


def test_every_invariant_is_broken_by_a_mutation() -> None:
    assert {m[1] for m in MUTATIONS} | {"memory"} == {"form", *INVARIANTS}


@given(plans(training=True), st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_any_dropped_or_repeated_task_is_found(plan: Plan, rng: Any) -> None:
    """But for a RECOMPUTE: without it the activations of the FORWARD are kept, which is a plan as well. And a
    plan without its only BACKWARD is one of forwards."""
    for task in rng.sample(range(len(plan)), min(4, len(plan))):
        assert broken(repeat(plan, task))
        less = drop(plan, task)
        if plan.table.kind[task] != Kind.RECOMPUTE and less.training:
            assert broken(less)


@given(plans(), st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_any_buffer_freed_before_its_last_reader_is_found(plan: Plan, rng: Any) -> None:
    """Freeing at the writer is always too early: every buffer has a reader beyond it."""
    for buffer in rng.sample(range(len(plan.buffers)), min(4, len(plan.buffers))):
        assert "lifetimes" in broken(set_buffer(plan, "free", buffer, int(plan.buffers.writer[buffer])))


def test_ordered_stages_run_their_forwards_in_order() -> None:
    """Stages whose buffers change per microbatch."""
    plan = pipec.compile(pipec.chain(2), 2, 3, "gpipe")
    plan = evolve(plan, graph=evolve(plan.graph, stages=tuple(evolve(s, ordered=True) for s in plan.graph.stages)))
    assert broken(plan) == {}
    mutant = swap(plan, 1, Lane.COMPUTE, row(plan, "1F0"), row(plan, "1F1"))
    assert broken(mutant)["order"] == [
        "1F1 (stage 's1', device 1) stands before 1F0 (stage 's1', device 1); stages whose buffers change run their "
        "forwards in ascending order of the microbatches"
    ]


# -- deadlock, memory, many problems ---------------------------------------------------------------------------


def test_deadlock_tells_where_every_lane_stands() -> None:
    plan = pipec.compile(pipec.chain(2), 2, 2, "gpipe")
    mutant = swap(plan, 0, Lane.OUT, row(plan, "v0[0]:0>1"), row(plan, "v0[1]:0>1"))
    with pytest.raises(pipec.PlanError) as error:
        execution_order(mutant)
    assert str(error.value) == "\n".join([
        "the plan deadlocks:",
        "  device 0 compute stands at 0B0, which waits for dv0[0]:1>0 (device 1)",
        "  device 0 copy-out stands at v0[1]:0>1, which waits for its turn on the other lane",
        "  device 0 copy-in stands at dv0[0]:1>0, which waits for 1B0 (device 1)",
        "  device 1 compute stands at 1F0, which waits for v0[0]:0>1 (device 0)",
        "  device 1 copy-out stands at dv0[0]:1>0, which waits for 1B0 (device 1)",
        "  device 1 copy-in stands at v0[0]:0>1, which waits for its turn on the other lane",
    ])
    with pytest.raises(pipec.PlanError, match="the plan deadlocks"):
        mutant.simulate()
    found = broken(mutant)
    assert set(found) == {"progress", "copies"}


def test_memory_limit_in_shares() -> None:
    net = pipec.chain(4)
    plan = pipec.compile(net, 4, 8, memory_limit=pipec.activations(4))
    assert plan.verify(pipec.activations(4))["memory"].unchecked is None
    assert broken(plan, memory_limit=pipec.activations(3.5)) == {
        "memory": ["device 0 holds 4 activations at its peak; the limit is 3.5"]
    }
    with pytest.raises(pipec.PlanError, match="device 3 holds 8 activations at its peak; the limit is 4"):
        pipec.compile(net, 4, 8, "gpipe", memory_limit=pipec.activations(4))


def test_memory_limit_in_bytes() -> None:
    sizes = {f"s{s}": {"activation_bytes": 1000, "output_bytes": 24} for s in range(2)}
    plan = pipec.compile(pipec.chain(2), 2, 2, costs=pipec.Costs(stages=sizes))
    peaks = plan.simulate().peak_bytes
    assert peaks is not None
    assert plan.verify(max(peaks))["memory"].unchecked is None
    assert broken(plan, memory_limit=max(peaks) - 1)["memory"][0] == (
        "device 0 holds 1.977 KiB at its peak; the limit is 1.976 KiB"
    )


def test_unknown_bytes_are_never_passed() -> None:
    costs = pipec.Costs(stages={"s0": {"activation_bytes": 8, "output_bytes": 8}})
    with pytest.raises(pipec.ScheduleError) as error:
        pipec.compile(pipec.chain(2), 2, 2, costs=costs, memory_limit=1e12)
    assert str(error.value) == (
        "memory_limit=1000000000000.0 is in bytes, but bytes are unknown for the activations of stage 's1'; give them "
        "as costs=pipec.Costs(stages={name: {'activation_bytes': ..., 'output_bytes': ...}}), profile the modules, or "
        "limit shares with pipec.activations(n)"
    )


@pytest.mark.parametrize("limit", [0, -1, float("nan"), True, "2GB"])
def test_a_limit_that_is_none(limit: Any) -> None:
    with pytest.raises(pipec.ScheduleError, match="memory_limit must be a positive number of bytes or"):
        pipec.compile(pipec.chain(2), 2, 2, memory_limit=limit)


def test_all_problems_come_in_one_error_of_bounded_length() -> None:
    plan = pipec.compile(pipec.chain(4), 4, 40)
    columns = {name: getattr(plan.table, name) for name in ("version", "stage")}
    mutant = evolve(plan, table=evolve(plan.table, version=np.ones(len(plan)), stage=columns["stage"]),
                    waits=waits_of([], len(plan)))
    with pytest.raises(pipec.PlanError) as error:
        mutant.verify()
    text = str(error.value)
    assert text.startswith("plan 'chain': ")
    assert "waits: and" in text
    assert "versions: and 316 more like the last" in text
    assert len(text) < 8000


def test_a_plan_of_one_task_and_of_many_names() -> None:
    net = pipeline([[-1]], [0], name="odd \"name\"\nwith lines")
    pipec.compile(net, 1, 1, forward_only=True).verify()


def test_problems_keep_the_users_names() -> None:
    plan = pipec.compile(unet(), 2, 2)
    task = row(plan, "3F1")
    assert "3F1 (stage 'dec1', device 1) is missing" in broken(drop(plan, task))["tasks"]


def test_gradient_of_a_skip_comes_from_every_reader() -> None:
    """One producer, readers on its own device and two others: three gradient buffers at home."""
    net = pipeline([[-1], [0], [0, 1], [0, 2]], [3])
    plan = pipec.compile(net, 3, 2, placement=[0, 0, 1, 2])
    held = [i for i in range(len(plan.buffers)) if plan.buffers.token(i) == "dv0[0]" and plan.buffers.device[i] == 0]
    assert len(held) == 3
    for buffer in held:
        found = broken(take_buffers(plan, np.flatnonzero(np.arange(len(plan.buffers)) != buffer)))
        assert list(found) == ["lifetimes"]
    assert Buffer(plan.buffers.kind[held[0]]) is Buffer.GRADIENT


def test_table_helpers_make_equal_tables() -> None:
    """The mutations start from what they mutate: taking all rows changes nothing."""
    plan = pipec.compile(pipec.chain(2), 2, 2)
    assert isinstance(plan.table, Table)
    assert evolve(plan, table=plan.table.take(np.arange(len(plan))), waits=waits_of(edges_of(plan), len(plan))) == plan
