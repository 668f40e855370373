"""Tasks that run as one: how a policy says so, what verify asks of them, what they cost, and dualpipe-v."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from models import gradients, recipes, same
from mutate import broken, drop, row, set_column, swap, waits_of
from plans import any_order, needs, pipelines

import pipec
from pipec.ir import Kind, Lane, Plan
from pipec.schedules import B, F, format_schedule, overlap, parse_schedule, tasks_of


def rows_of(plan: Plan) -> list[str]:
    """Per device its compute tasks, those of one group joined."""
    made = []
    for device in range(plan.devices):
        text = ""
        before = 0
        for task in plan.compute(device):
            text += ("&" if task.group and task.group == before else " ") + str(task)
            before = task.group
        made.append(text.strip())
    return made


VEE = {"devices": 2, "microbatches": 4, "schedule": "dualpipe-v"}


def vee(**more: Any) -> Plan:
    return pipec.compile(pipec.chain(4), **(VEE | more))


# -- what a policy says --------------------------------------------------------------------------------------------


def test_the_lists_of_dualpipe_v():
    assert rows_of(vee()) == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3&3B1 3F2&0B0 3B2 3F3&0B1 3B3 0I2 0W2 0I3 0W3",
        "1F0 2F0 1F1 2F1 1F2 2B0 2F2&1B0 1F3&2B1 2F3&1B1 2B2 1B2 2I3 1I3 2W3 1W3",
    ]


def test_fewer_microbatches_are_left_out():
    assert rows_of(vee(microbatches=1)) == ["0F0 3F0 3I0 3W0 0B0", "1F0 2F0 2B0 1B0"]


def test_chunks_of_several_stages_take_turns():
    plan = pipec.compile(pipec.chain(9), 2, 4, "dualpipe-v")  # chunks of 3, 2, 2 and 2 stages
    assert [len(chunk.stages) for chunk in plan.chunks] == [3, 2, 2, 2]
    assert "0F3&8B1 1F3&7B1 2F3" in rows_of(plan)[0]
    assert "7F2&2B0 8F2&1B0 0B0" in rows_of(plan)[0]


def test_a_group_keeps_the_order_of_its_tasks_and_stages_without_a_backward_leave_it():
    net = pipec.Pipeline("side")
    x = net.input("x")
    a = net.stage("a", None, x)
    net.output(net.stage("report", None, a))
    b = net.stage("b", None, a)
    net.loss("loss", None, b)

    def mine(problem: Any) -> Any:
        return [[F(0, 0), overlap(B(0, 0), F(0, 1)), B(0, 1)]]

    plan = pipec.compile(net, 1, 2, mine)
    assert rows_of(plan) == ["0F0 1F0 2F0 2B0&0F1 0B0&1F1 2F1 2B1 0B1"]


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        (overlap(F(1, 0)), "schedule 'mine': 1 problem\n  1. device 1: an overlap of 1 tasks; it needs at least two"),
        (overlap(F(1, 0), B(1, 0)), "schedule 'mine': 1B0 and 1F0 overlap, but 1B0 needs 1F0; only tasks that do not "
                                    "need each other can run as one"),
        (overlap(F(1, 0), F(0, 0)), "schedule 'mine': 1 problem\n  1. device 1: 0F0: chunk 0 is on device 0"),
        (overlap(F(1, 0), "1B0"), "schedule 'mine': 1 problem\n  1. device 1: '1B0' is no task; write F(chunk"),
    ],
)
def test_overlaps_that_cannot_be_are_refused(entry, told):
    def mine(problem: Any) -> Any:
        rest = [] if isinstance(entry, type(overlap())) and B(1, 0) in entry.ops else [B(1, 0)]
        return [[F(0, 0), B(0, 0)], [entry, *rest]]

    with pytest.raises(pipec.ScheduleError) as error:
        pipec.compile(pipec.chain(2), 2, 1, mine)
    assert str(error.value).startswith(told)


def test_groups_that_wait_for_each_other_deadlock_although_their_tasks_would_not():
    """Device 0 would run 2F0 after 0F1, which device 1 needs for what 2F0 reads: as one task, neither can begin."""

    def mine(problem: Any) -> Any:
        fused = overlap(F(0, 1), F(2, 0))
        return [[F(0, 0), fused, F(2, 1), B(2, 0), B(2, 1), B(0, 0), B(0, 1)],
                [overlap(F(1, 1), F(1, 0)), B(1, 0), B(1, 1)]]

    with pytest.raises(pipec.PlanError) as error:
        pipec.compile(pipec.chain(3), 2, 2, mine, placement=[0, 1, 0])
    assert str(error.value) == (
        "schedule 'mine' deadlocks:\n  device 0 stands at 0F1&2F0, which waits for 1F1&1F0 (device 1)\n"
        "  device 1 stands at 1F1&1F0, which waits for 0F1&2F0 (device 0)"
    )


def test_a_schedule_as_text_has_overlaps():
    policy = parse_schedule("0: 0F0 0F1 0F2 1F0 1I0 1W0 1F1 0F3&1B1 1F2&0B0 1B2 1F3&0B1 1B3 0I2 0W2 0I3 0W3")
    assert policy.rows[0][7] == overlap(F(0, 3), B(1, 1))
    assert format_schedule(policy.rows) == format_schedule(parse_schedule(format_schedule(policy.rows)).rows)
    assert tasks_of(policy.rows[0])[7:9] == [F(0, 3), B(1, 1)]
    with pytest.raises(pipec.ScheduleError, match="'0F3&x' is no task"):
        parse_schedule("0F3&x")


def test_evaluation_has_no_groups():
    plan = vee(forward_only=True)
    assert not plan.table.group.any()


def test_v_is_needed():
    with pytest.raises(pipec.ScheduleError) as error:
        vee(placement="looped")
    assert str(error.value) == (
        "schedule 'dualpipe-v' needs 4 chunks in a V, chunk c on device c and back up, but there are 4, and chunk 2 "
        "(stage 's2') is on device 0; use placement='v', or a schedule for any placement: '1f1b', 'zb-v', 'gpipe'"
    )


# -- figures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gain", [1.0, 0.75])
@pytest.mark.parametrize("durations", [(1.0, 1.0, 1.0), (1.0, 1.125, 0.875), (1.0, 0.9, 0.8)])
@pytest.mark.parametrize("P", [1, 2, 3, 4, 6, 8])
def test_closed_form_of_dualpipe_v(P, durations, gain):
    """Published: bubble (P-1)(F&B + B - 2W) in chunk times, F near B; at most 2P+1 chunk activations.

    With an F in place of the B it is exact, on the last device, which overlaps most.
    """
    forward, _, weights = durations
    fused = gain * sum(durations)
    for M in (2 * P, 2 * P + 1, 3 * P + 2, 4 * P):
        line = pipec.compile(
            pipec.chain(2 * P), P, M, "dualpipe-v", costs=pipec.Costs(*durations, overlap=gain)
        ).simulate()
        assert line.makespan - min(line.useful) == pytest.approx((P - 1) * (fused + forward - 2 * weights))
        assert max(line.peak_share) * 2 == 2 * P + 1


def test_what_a_group_costs():
    """Times worked out by hand: 0F3 and 3B1 start when both can and end together; what they make leaves then."""
    plan = vee(costs=pipec.Costs(overlap=0.5, latency=1.0))
    line = plan.simulate()
    first, second = row(plan, "0F3"), row(plan, "3B1")
    assert line.end[first] - line.start[first] == 0.5
    assert line.end[second] - line.start[second] == 1.0
    assert line.start[second] == line.end[first]
    copy = row(plan, "v0[3]:0>1")
    assert line.start[copy] == line.end[second]
    assert line.start[row(plan, "1F3")] >= line.end[second] + 1.0
    assert line.useful[0] == 4 * 2 * 3 - 0.5 * 3 * 3  # three groups of F and B on device 0
    path = line.critical_path
    assert all(line.start[b] >= line.end[a] - 1e-9 for a, b in pairwise(path))
    assert line.start[path[0]] == 0.0
    assert "overlap 0.5" in str(pipec.Costs(overlap=0.5))
    assert "overlap" not in str(pipec.Costs())
    with pytest.raises(pipec.SpecError, match="overlap must not be negative"):
        pipec.Costs(overlap=-1)


def overlapped(order: Any, seed: int) -> Any:
    """``order`` with neighbours joined at random where no path leads from one to the other."""

    def joined(problem: Any) -> Any:
        rng = np.random.default_rng(seed)
        rows = []
        for ops in order(problem):
            made: list[Any] = []
            while ops:
                pair = ops[:2]
                if len(pair) == 2 and pair[0][2] != pair[1][2] and rng.random() < 0.5:
                    made.append(overlap(*pair))
                    ops = ops[2:]
                else:
                    made.append(ops[0])
                    ops = ops[1:]
            rows.append(made)
        return rows

    return joined


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_groups_run_as_one_or_deadlock(data):
    net = data.draw(pipelines(most=5))
    names = [s.name for s in net.spec.stages]
    devices = data.draw(st.integers(1, min(3, len(names))))
    seed = data.draw(st.integers(0, 500))
    order = overlapped(any_order(seed, data.draw(st.booleans())), seed)
    try:
        plan = pipec.compile(
            net, devices, data.draw(st.integers(1, 4)), order, update=data.draw(st.sampled_from([None, "stage"])),
            recompute=data.draw(st.sampled_from(["never", "always"])),
        )
    except pipec.PlanError as error:
        assert "deadlocks" in str(error)  # noqa: PT017 - groups that wait for each other
        return
    assert Plan.parse(str(plan)) == plan
    gain = 0.5
    line = plan.simulate(pipec.Costs(latency=0.25, overlap=gain))
    before = needs(plan)
    for number in range(1, int(plan.table.group.max(initial=0)) + 1):
        own = np.flatnonzero(plan.table.group == number)
        assert len(own) >= 2
        assert not any(before[task] & set(own[own > task].tolist()) for task in own.tolist())
        begin, end = line.start[own].min(), line.end[own].max()
        for task in own.tolist():
            assert all(line.end[need] <= begin for need in plan.waits.of(task))
        whole = sum(2.0 if plan.table.kind[t] == Kind.BACKWARD else 1.0 for t in own.tolist())
        assert end - begin == pytest.approx(gain * whole)
        readers = np.flatnonzero([bool(set(plan.waits.of(t).tolist()) & set(own.tolist())) for t in range(len(plan))])
        assert (line.start[readers] >= end - 1e-9).all()


# -- text, files, later passes -------------------------------------------------------------------------------------


def test_groups_survive_text_and_json(tmp_path: Path):
    plan = vee(recompute="always", update="stage", update_early=True)
    assert " group 1" in str(plan)
    assert Plan.parse(str(plan)) == plan
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    numbers = plan.table.group[plan.table.group > 0]
    assert list(dict.fromkeys(numbers.tolist())) == list(range(1, int(numbers.max()) + 1))


def test_recompute_and_updates_stand_outside_of_groups():
    plan = vee(recompute="always", update="stage", update_early=True)
    for device in range(2):
        tasks = list(plan.compute(device))
        kinds = [t.kind for t in tasks if t.group]
        assert kinds == [Kind.FORWARD, Kind.BACKWARD] * (len(kinds) // 2)
        for first, second in pairwise(tasks):
            if first.group and first.kind is Kind.FORWARD:
                assert second.group == first.group
    text = rows_of(plan)[0]
    assert "3R1 0F3&3B1" in text


# -- verify --------------------------------------------------------------------------------------------------------


def torn(plan: Plan) -> Plan:
    return swap(plan, 0, Lane.COMPUTE, row(plan, "3B1"), row(plan, "3F2"))


@pytest.mark.parametrize(
    ("invariant", "mutate", "message"),
    [
        ("groups", lambda p: set_column(p, "group", row(p, "3B1"), 0), r"0F3 \(.*\) is alone in group \d"),
        ("groups", lambda p: set_column(p, "group", row(p, "0W3"), int(p.table.group[row(p, "3B1")])), "is torn apart"),
        ("groups", torn, "is torn apart"),
        ("groups", lambda p: set_column(p, "group", row(p, "v0[3]:0>1"), 1), "only forwards and backwards overlap"),
        ("groups", lambda p: set_column(set_column(p, "group", row(p, "0I3"), 77), "group", row(p, "0W3"), 77),
         r"0W3 \(.*\) is in group 77 with 0I3 \(.*\), which it needs"),
        ("form", lambda p: set_column(p, "group", row(p, "0W3"), -1), "has group -1"),
        ("tasks", lambda p: drop(p, row(p, "3B1")), "3B1"),
    ],
    ids=["alone", "far", "torn", "copy", "dependent", "negative", "dropped"],
)
def test_mutations_of_groups_are_found(invariant, mutate, message):
    plan = vee()
    assert broken(plan) == {}
    found = broken(mutate(plan))
    assert invariant in found, found
    assert re.search(message, "\n".join(found[invariant])), found


def test_a_group_that_waits_for_itself_through_another_device_deadlocks():
    """0F1 and 2F0 side by side on device 0; 2F0 needs 1F0, which needs 0F0: legal. With 0F0 in the group it is not."""
    order = [[F(0, 0), F(2, 0), B(2, 0), B(0, 0)], [F(1, 0), B(1, 0)]]
    plan = pipec.compile(pipec.chain(3), 2, 1, lambda problem: order, placement=[0, 1, 0])
    mutant = set_column(set_column(plan, "group", row(plan, "0F0"), 1), "group", row(plan, "2F0"), 1)
    found = broken(mutant)
    assert "deadlocks" in "\n".join(found["progress"])


def test_plans_in_another_order_of_ids_simulate_alike():
    plan = vee(costs=pipec.Costs(latency=0.5, overlap=0.75))
    size = len(plan)
    new = np.random.default_rng(1).permutation(size)
    edges = [(int(new[a]), int(new[b])) for a in range(size) for b in plan.waits.of(a).tolist()]
    shuffled = evolve(
        plan, table=plan.table.take(np.argsort(new)), waits=waits_of(edges, size),
        lanes=tuple(tuple(new[ids].astype(np.int32) for ids in lanes) for lanes in plan.lanes),
        buffers=evolve(plan.buffers, writer=new[plan.buffers.writer], free=new[plan.buffers.free]),
    )
    shuffled.verify()
    assert shuffled.simulate().makespan == plan.simulate().makespan


# -- runtime and pictures ------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(recipes(most=6), st.integers(1, 7), st.sampled_from(["threads", "replay"]), st.sampled_from(["never", "always"]))
def test_dualpipe_v_gives_the_numbers_of_the_reference(recipe, microbatches, backend, recompute):
    mine, theirs = recipe.build(), recipe.build()
    few = len(recipe.nodes) < 2
    plan = pipec.compile(
        mine, max(1, len(recipe.nodes) // 2), microbatches, "1f1b" if few else "dualpipe-v", recompute=recompute
    )
    batch = models.batch(9)
    with pipec.Runner(mine, plan, backend=backend, seed=1) as run:
        result = run.step(**batch)
    wanted = pipec.reference(theirs, microbatches, seed=1).step(**batch)
    assert same(result.losses, wanted.losses)
    assert same(result.outputs, wanted.outputs)
    assert same(gradients(mine), gradients(theirs))


def test_a_group_is_framed():
    plan = vee()
    dot = plan.draw().dot
    assert len(re.findall(r"group-\d+", dot)) == int(plan.table.group.max())
    assert "runs as one" in dot
    assert "runs as one with 3B1" in dot
    assert "group-" not in pipec.compile(pipec.chain(4), 2, 4).draw().dot
