"""The steps of asynchronous plans: prologue, steady period and epilogue."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import ancestors, asynchronous_plans, needs, pipeline, unet

import pipec
from pipec import PipeDream2BW
from pipec.ir import Kind, Lane, Plan
from pipec.periods import minibatch_of, periods, settled
from pipec.runtime.asynchronous.part import part
from pipec.simulate import durations, run_clock


def compiled(net: Any, devices: int, microbatches: int, schedule: Any, **options: Any) -> Plan:
    return pipec.compile(net, devices, microbatches, schedule, update="stage", **options)


def tokens(plan: Plan, ids: Any, device: int) -> str:
    return " ".join(str(plan.table.task(i)) for i in ids.tolist()
                    if plan.table.device[i] == device and plan.table.kind[i] != Kind.COPY)


def listed(plan: Plan) -> list[list[str]]:
    """Per step, the epilogue last, the compute tasks of every device."""
    found = periods(plan)
    return [[tokens(plan, found.ids(k), d) for d in range(plan.devices)] for k in range(plan.minibatches + 1)]


def test_steps_of_a_small_pipedream() -> None:
    plan = compiled(pipec.chain(3), 3, 2, "pipedream")
    assert (plan.minibatches, plan.microbatches, plan.minibatch, periods(plan).steady) == (5, 10, 2, 2)
    assert plan.behind == (0, 0, 2)
    assert listed(plan) == [
        ["0F0 0F1", "1F0 1F1 1B0", "2F0 2B0 2F1"],
        ["0F2 0B0 0F3 0B1 0U0", "1F2 1B1 1U0 1F3 1B2", "2B1 2U0 2F2 2B2 2F3"],
        ["0F4 0B2 0F5 0B3 0U1", "1F4 1B3 1U1 1F5 1B4", "2B3 2U1 2F4 2B4 2F5"],
        ["0F6 0B4 0F7 0B5 0U2", "1F6 1B5 1U2 1F7 1B6", "2B5 2U2 2F6 2B6 2F7"],
        ["0F8 0B6 0F9 0B7 0U3", "1F8 1B7 1U3 1F9 1B8", "2B7 2U3 2F8 2B8 2F9"],
        ["0B8 0B9 0U4", "1B9 1U4", "2B9 2U4"],
    ]


def test_two_devices_begin_and_end_a_step_together() -> None:
    """Device 1 begins with what it has, not with waiting for a forward of device 0, which ends with one."""
    plan = compiled(pipec.chain(2), 2, 2, "pipedream")
    assert plan.behind == (1, 3)
    assert listed(plan)[2:4] == [
        ["0B2 0F4 0B3 0U1 0F5", "1F3 1B3 1U1 1F4 1B4"],
        ["0B4 0F6 0B5 0U2 0F7", "1F5 1B5 1U2 1F6 1B6"],
    ]


@pytest.mark.parametrize("schedule", ["pipedream", "live-weights", "pipemare"])
@pytest.mark.parametrize(("devices", "microbatches"), [(2, 1), (2, 4), (3, 2), (4, 1), (4, 4), (7, 3)])
def test_a_step_takes_hardly_longer_than_the_undisturbed_flow(schedule: str, devices: int, microbatches: int) -> None:
    """Without ``behind`` every step would take devices - 1 forwards longer."""
    plan = compiled(pipec.chain(devices), devices, microbatches, schedule)
    timeline = plan.simulate()
    assert timeline.period == 3 * microbatches
    assert timeline.step == timeline.period if devices == 2 else timeline.step <= timeline.period + 2
    assert f"period {3 * microbatches} a minibatch, step {timeline.step:g}, bubble 0.0%" in str(timeline)
    own = part(plan, periods(plan).ids(plan.minibatches - 2))
    assert run_clock(own, durations(own, pipec.Costs()), pipec.Costs())[1].max() == timeline.step


def test_given_costs_tell_where_a_step_is_cut() -> None:
    """Six short stages and three long ones, a device each: as busy as one another, but not if all took as long."""
    costs = pipec.Costs(stages={f"s{i}": {"forward": 2.0, "backward_input": 2.0, "backward_weight": 2.0}
                                for i in range(6, 9)})
    net, placement = pipec.chain(9), [0] * 6 + [1] * 3
    for told in (None, costs):
        plan = compiled(net, 2, 4, "pipedream", placement=placement, costs=told)
        assert plan.simulate(costs).step == plan.simulate(costs).period == 72
    plan = compiled(net, 2, 4, "pipedream", placement=placement, costs=pipec.Costs())
    assert plan.simulate(costs).step > plan.simulate(costs).period == 72


def test_a_backward_and_a_forward_share_a_tick_in_pipemare() -> None:
    plan = compiled(pipec.chain(2), 2, 1, "pipemare")
    assert [tokens(plan, plan.lanes[d][Lane.COMPUTE], d) for d in range(2)] == [
        "0F0 0F1 0F2 0B0 0F3 0U0 0B1 0F4 0U1 0B2 0F5 0U2 0B3 0U3 0B4 0U4 0B5 0U5",
        "1F0 1B0 1F1 1U0 1B1 1F2 1U1 1B2 1F3 1U2 1B3 1F4 1U3 1B4 1F5 1U4 1B5 1U5",
    ]


@given(asynchronous_plans())
@settings(max_examples=40, deadline=None)
def test_a_step_runs_what_needs_its_minibatch_but_what_devices_are_behind(plan: Plan) -> None:
    found, before = periods(plan), needs(plan)
    table, roots = plan.table, [not stage.reads for stage in plan.graph.stages]
    fed = np.zeros(len(plan), np.int64)
    for task in range(len(plan)):
        above = ancestors(before, task)
        fed[task] = max((int(table.microbatch[t]) // plan.minibatch for t in above | {task}
                         if table.kind[t] == Kind.FORWARD and roots[table.stage[t]]), default=0)
        assert max((found.step[t] for t in above), default=0) <= found.step[task]
    assert (found.step >= fed).all()
    for step in range(found.steady, plan.minibatches):
        for device, behind in enumerate(plan.behind or [0] * plan.devices):
            lane = plan.lanes[device][Lane.COMPUTE]
            # the order in which copies stand on their lanes can let even more of a step wait for the next minibatch
            assert 0 <= (fed[lane] <= step - 1).sum() - (found.step[lane] <= step - 1).sum() <= behind
    assert (np.diff(found.step) >= 0).all()  # every device's list runs step after step
    if not plan.behind:
        assert (np.minimum(found.step, plan.minibatches - 1) == fed).all()


@given(asynchronous_plans())
@settings(max_examples=40, deadline=None)
def test_three_steady_steps_are_equal_up_to_a_minibatch_and_its_updates(plan: Plan) -> None:
    found = periods(plan)
    assert found.steady == plan.minibatches - 3
    table, updates = plan.table, plan.minibatch // plan.update_every
    trained = set(table.stage[table.kind == Kind.UPDATE].tolist())

    def seen(step: int) -> list[Any]:
        rows = []
        for i in found.ids(step).tolist():
            task = table.task(i)
            shift = (updates if task.kind is Kind.UPDATE else plan.minibatch) * step
            version = task.version - step * updates * (task.kind is not Kind.COPY and task.stage in trained)
            rows.append((task.kind, task.stage, task.microbatch - shift, version, task.device, task.peer))
        return rows

    first = seen(found.steady)
    assert first == seen(found.steady + 1) == seen(found.steady + 2)
    assert sum(row[0] is Kind.FORWARD for row in first) == plan.minibatch * len(plan.graph.stages)


@given(asynchronous_plans(), st.data())
@settings(max_examples=40, deadline=None)
def test_the_flush_after_some_minibatches_leaves_nothing_of_them(plan: Plan, data: Any) -> None:
    found = periods(plan)
    after = data.draw(st.integers(1, plan.minibatches))
    done = np.concatenate([np.flatnonzero(found.step < after), found.flush(after)])
    assert sorted(done.tolist()) == np.flatnonzero(minibatch_of(plan) < after).tolist()
    before = needs(plan)
    wanted = {task for task in done.tolist() for task in plan.waits.of(task).tolist()}
    assert wanted <= set(done.tolist())
    assert all(before[task] <= set(range(len(plan))) for task in done.tolist())
    if after == plan.minibatches:
        assert found.flush(after).tolist() == found.ids(after).tolist()


def test_the_flush_of_a_longer_run_is_the_epilogue_moved_on() -> None:
    plan = compiled(unet(2), 3, 2, "pipemare")
    found = periods(plan)
    last = [str(plan.table.task(i)) for i in found.flush(plan.minibatches).tolist()]
    for back in (1, 2):
        ids = found.flush(plan.minibatches - back)
        moved = plan.table.take(ids)
        own = plan.minibatch - np.where(moved.kind == Kind.UPDATE, plan.minibatch - 1, 0)
        column = moved.microbatch + back * own
        assert [str(evolve(moved.task(i), microbatch=int(column[i]))) for i in range(len(ids))] == last


def test_a_synchronous_plan_has_one_step() -> None:
    plan = pipec.compile(pipec.chain(3), 3, 4)
    found = periods(plan)
    assert found.step.tolist() == [0] * len(plan)
    assert (plan.asynchronous, plan.minibatches, plan.minibatch, plan.update_every) == (False, 1, 4, 4)
    with pytest.raises(pipec.PlanError, match="no steady period"):
        settled(plan)


def test_two_buffered_weights_need_a_microbatch_per_stage() -> None:
    with pytest.raises(pipec.ScheduleError, match="4 chunks, but microbatches=3"):
        compiled(pipec.chain(4), 4, 3, PipeDream2BW())
    assert settled(compiled(pipec.chain(4), 4, 4, PipeDream2BW())).steady == 2


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("slow", [1.5, 1e6])
def test_a_device_that_no_other_waits_for_keeps_the_pace_of_steps(microbatches: int, slow: float) -> None:
    """Undisturbed, the last stage, which no loss depends on, would fall behind more with every minibatch, and a tower
    of its own would run away from a slower one."""
    slower = pipec.Costs(stages={"s3": {"forward": 3 * slow}})
    plan = compiled(pipeline([[-1], [0], [1], [1]], [2]), 4, microbatches, "pipedream", costs=slower)
    assert plan.behind[3] <= 1
    assert plan.minibatches == (9 if microbatches == 1 else 5)
    slower = pipec.Costs(stages={f"s{i}": {"forward": slow, "backward_input": slow} for i in (0, 1)})
    plan = compiled(pipeline([[-1], [0], [-1], [2]], [1, 3]), 4, microbatches, "pipedream", costs=slower)
    assert max(plan.behind, default=0) <= 5
    assert plan.simulate(slower).step <= plan.simulate(slower).period + slow


@pytest.mark.parametrize(("behind", "told"), [
    ("0,0", "says behind=0,0, but that is one number of tasks for each of its 3 devices"),
    ("0,0,2,1", "says behind=0,0,2,1, but that is one number of tasks for each of its 3 devices"),
    ("0,-1,2", "says behind=0,-1,2, but its devices have 25, 25, 25 tasks that a step could leave to the next"),
    ("0,26,0", "says behind=0,26,0, but its devices have 25, 25, 25 tasks that a step could leave"),
    ("99999999999999999999,0,0", "says behind=99999999999999999999,0,0, but its devices have 25"),
    ("0,x,0", "cannot read the plan's first line: .*'x'"),
    ("0,,0", "cannot read the plan's first line"),
])
def test_numbers_of_tasks_behind_that_cannot_be(behind: str, told: str) -> None:
    text = str(compiled(pipec.chain(3), 3, 2, "pipedream"))
    assert " behind=0,0,2\n" in text
    with pytest.raises(pipec.PlanError, match=told):
        Plan.parse(text.replace(" behind=0,0,2\n", f" behind={behind}\n"))
    synchronous = str(pipec.compile(pipec.chain(3), 3, 2)).replace("\n", " behind=0,0,2\n", 1)
    with pytest.raises(pipec.PlanError, match="says behind=0,0,2, but only an asynchronous plan has steps"):
        Plan.parse(synchronous)


def test_steps_that_leave_more_and_more_to_the_flush_are_found() -> None:
    """Steps that run nothing, or leave out a stage, are equal too; but what they leave out would never be run."""
    plan = compiled(pipec.chain(2), 2, 1, "pipemare")
    with pytest.raises(pipec.PlanError, match=r"periods.*with as many tasks as a minibatch has"):
        evolve(plan, behind=(18, 18)).verify()
    plan = compiled(pipeline([[-1], [0], [0]], [1]), 3, 2, "pipedream")
    evolve(plan, behind=(0, 0, 2)).verify()
    never = evolve(plan, behind=(0, 0, int((plan.table.device == 2).sum())))
    with pytest.raises(pipec.PlanError, match=r"periods.*with as many tasks as a minibatch has"):
        never.verify()
    with pytest.raises(pipec.PlanError, match="no steady period"):
        _ = never.simulate().period


def test_a_step_of_a_hundred_devices_is_cut_well() -> None:
    plan = compiled(pipec.chain(107), 107, 8, "pipemare")
    assert (plan.simulate().period, plan.simulate().step) == (24.0, 26.0)
