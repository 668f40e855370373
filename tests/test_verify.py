"""Every invariant holds for every compiled plan, and every way to break one is found under its name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from mutate import (
    broken,
    drop,
    edges_of,
    renumbered,
    repeat,
    row,
    set_buffer,
    swap,
    take_buffers,
    waits_of,
    without_wait,
)
from plans import ancestors, any_order, needs, pipeline, plans, unet

import pipec
from pipec.ir import Buffer, Kind, Lane, Plan, Table
from pipec.verify import execution_order
from pipec.verify.reach import Reach

MODES = [
    {"schedule": schedule, "recompute": recompute, "update": update}
    for schedule in ("gpipe", "1f1b", any_order(3, split=True))
    for recompute in ("never", "except_last", "always")
    for update in (None, "stage", "all")
]


# -- no false alarm --------------------------------------------------------------------------------------------


@given(plans(host=True))
@settings(max_examples=150)
def test_every_compiled_plan_holds(plan: Plan) -> None:
    report = plan.verify()
    held = {f.invariant for f in report.findings if f.unchecked is None}
    assert held >= {"form", "tasks", "order", "progress", "waits", "lifetimes", "copies", "versions"}


@given(plans(host=True), st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_ids_need_not_be_an_order(plan: Plan, rng: Any) -> None:
    """The same plan with its tasks numbered at random holds as well, and gets an execution order."""
    order = list(range(len(plan)))
    rng.shuffle(order)
    shuffled = renumbered(plan, order)
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
    assert str(report) == "\n".join(
        [
            "plan 'chain'",
            "  form: holds",
            "  tasks: holds",
            "  order: holds",
            "  groups: holds",
            "  progress: holds",
            "  rendezvous: holds",
            "  waits: holds",
            "  lifetimes: holds",
            "  copies: holds",
            "  versions: holds",
            "  memory: not checked: no memory limit is given",
            "  updates: not checked: the plan updates each stage early, so nothing may need all gradients at once",
            "  reduces: holds",
            "  periods: not checked: a synchronous plan has no steady period",
        ]
    )
    assert report["waits"].unchecked is None
    with pytest.raises(pipec.PlanError, match="no invariant is named 'speed'; they are form, tasks"):
        report["speed"]


# -- waits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mode", MODES, ids=lambda m: "-".join(getattr(v, "__name__", str(v)) for v in m.values())
)
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


@given(plans(host=True), st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_any_removed_wait_is_found_when_it_matters(plan: Plan, rng: Any) -> None:
    edges = edges_of(plan)
    for task, need in rng.sample(edges, min(len(edges), 6)):
        mutant = without_wait(plan, task, need)
        assert bool(broken(mutant)) == (need not in ancestors(needs(mutant), task))


@given(plans(host=True))
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


@given(plans(host=True), st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_any_buffer_freed_before_its_last_reader_is_found(plan: Plan, rng: Any) -> None:
    """Freeing at the writer is always too early: every buffer has a reader beyond it."""
    for buffer in rng.sample(range(len(plan.buffers)), min(4, len(plan.buffers))):
        assert "lifetimes" in broken(set_buffer(plan, "free", buffer, int(plan.buffers.writer[buffer])))


def test_ordered_stages_run_their_forwards_in_order() -> None:
    """Stages whose buffers change per microbatch."""
    plan = pipec.compile(pipec.chain(2), 2, 3, "gpipe")
    plan = evolve(
        plan, graph=evolve(plan.graph, stages=tuple(evolve(s, ordered=True) for s in plan.graph.stages))
    )
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
    assert str(error.value) == "\n".join(
        [
            "the plan deadlocks:",
            "  device 0 compute stands at 0B0, which waits for dv0[0]:1>0 (device 1)",
            "  device 0 copy-out stands at v0[1]:0>1, which waits for its turn on the other lane",
            "  device 0 copy-in stands at dv0[0]:1>0, which waits for 1B0 (device 1)",
            "  device 1 compute stands at 1F0, which waits for v0[0]:0>1 (device 0)",
            "  device 1 copy-out stands at dv0[0]:1>0, which waits for 1B0 (device 1)",
            "  device 1 copy-in stands at v0[0]:0>1, which waits for its turn on the other lane",
        ]
    )
    with pytest.raises(pipec.PlanError, match="the plan deadlocks"):
        mutant.simulate()
    found = broken(mutant)
    assert set(found) == {"progress", "copies"}


def test_a_send_that_is_issued_behind_its_answer() -> None:
    """Harmless with a lane of its own; with one order of issue the device waits for the answer before it asks."""
    plan = pipec.compile(pipec.chain(4), 2, 2, "gpipe", placement="looped")
    assert plan.verify()["rendezvous"].unchecked is None
    send, answer = row(plan, "v0[0]:0>1"), row(plan, "v1[0]:1>0")
    order = [task for task in range(len(plan)) if task != send]
    order.insert(order.index(answer) + 1, send)
    told = renumbered(plan, order).verify()["rendezvous"].unchecked
    assert told is not None
    assert told.startswith("one task after another in the order of ids deadlocks:")
    assert "device 0 stands at v1[0]:1>0, which waits for 1F0 (device 1)" in told
    assert "device 1 stands at 1F0, which waits for v0[0]:0>1 (device 0)" in told


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
    mutant = evolve(
        plan,
        table=evolve(plan.table, version=np.ones(len(plan)), stage=columns["stage"]),
        waits=waits_of([], len(plan)),
    )
    with pytest.raises(pipec.PlanError) as error:
        mutant.verify()
    text = str(error.value)
    assert text.startswith("plan 'chain': ")
    assert "waits: and" in text
    assert "versions: and 316 more like the last" in text
    assert len(text) < 8000


def test_a_plan_of_one_task_and_of_many_names() -> None:
    net = pipeline([[-1]], [0], name='odd "name"\nwith lines')
    pipec.compile(net, 1, 1, forward_only=True).verify()


def test_problems_keep_the_users_names() -> None:
    plan = pipec.compile(unet(), 2, 2)
    task = row(plan, "3F1")
    assert "3F1 (stage 'dec1', device 1) is missing" in broken(drop(plan, task))["tasks"]


def test_gradient_of_a_skip_comes_from_every_reader() -> None:
    """One producer, readers on its own device and two others: three gradient buffers at home."""
    net = pipeline([[-1], [0], [0, 1], [0, 2]], [3])
    plan = pipec.compile(net, 3, 2, placement=[0, 0, 1, 2])
    held = [
        i
        for i in range(len(plan.buffers))
        if plan.buffers.token(i) == "dv0[0]" and plan.buffers.device[i] == 0
    ]
    assert len(held) == 3
    for buffer in held:
        found = broken(take_buffers(plan, np.flatnonzero(np.arange(len(plan.buffers)) != buffer)))
        assert list(found) == ["lifetimes"]
    assert Buffer(plan.buffers.kind[held[0]]) is Buffer.GRADIENT


def test_table_helpers_make_equal_tables() -> None:
    """The mutations start from what they mutate: taking all rows changes nothing."""
    plan = pipec.compile(pipec.chain(2), 2, 2)
    assert isinstance(plan.table, Table)
    assert (
        evolve(plan, table=plan.table.take(np.arange(len(plan))), waits=waits_of(edges_of(plan), len(plan)))
        == plan
    )
