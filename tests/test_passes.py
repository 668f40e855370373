"""The passes: golden texts of small plans, and what each pass promises."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import any_order, pipeline, pipelines, plans, unet

import pipec
from pipec.compiler import forward_plan
from pipec.ir import Buffer, Kind, Lane, Plan
from pipec.passes.place import balance, place
from pipec.schedules import B, F, I, W

GOLDEN: dict[str, Callable[[], Plan]] = {
    "chain-1f1b": lambda: pipec.compile(pipec.chain(3), 3, 3),
    "chain-gpipe": lambda: pipec.compile(pipec.chain(2), 2, 2, "gpipe"),
    "one-device": lambda: pipec.compile(pipec.chain(2), 1, 2, update="all"),
    "unet": lambda: pipec.compile(unet(), 2, 2, update="stage"),
    "unet-folded": lambda: pipec.compile(unet(), 2, 2, placement=[0, 1, 1, 1, 0], recompute="except_last"),
    "recompute-some": lambda: pipec.compile(pipec.chain(3), 3, 3, "gpipe", recompute={"s0": "always"}),
    "update-early": lambda: pipec.compile(pipec.chain(2), 2, 2, update="stage", update_early=True),
    "looped": lambda: pipec.compile(pipec.chain(4), 2, 2, placement="looped", update="all"),
    "split": lambda: pipec.compile(
        pipec.chain(2),
        2,
        2,
        lambda p: [
            [F(0, 0), F(0, 1), I(0, 0), I(0, 1), W(0, 0), W(0, 1)],
            [F(1, 0), I(1, 0), F(1, 1), I(1, 1), W(1, 0), W(1, 1)],
        ],
    ),
    "pipedream": lambda: pipec.compile(pipec.chain(2), 2, 1, "pipedream", update="stage"),
    "pipemare-segments": lambda: pipec.compile(pipec.chain(2), 2, 1, pipec.PipeMare(segments=2), update="stage"),
    "host": lambda: pipec.compile(unet(hold="host"), 3, 3, "gpipe", placement=[0, 1, 2, 2, 0]),
    "forward-only": lambda: pipec.compile(unet(1), 2, 2, forward_only=True),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name: str, golden: Callable[[str, str], None]) -> None:
    golden(f"{name}.txt", str(GOLDEN[name]()))


# -- place -----------------------------------------------------------------------------------------------------


def chunks(
    net: pipec.Pipeline, devices: int, *args: Any, **options: Any
) -> list[tuple[int, tuple[int, ...]]]:
    return [(c.device, c.stages) for c in place(net.spec, devices, *args, **options)]


def test_placements() -> None:
    net = pipec.chain(8)
    assert chunks(net, 3) == [(0, (0, 1, 2)), (1, (3, 4, 5)), (2, (6, 7))]
    assert chunks(net, 2, "looped") == [(c % 2, (c,)) for c in range(8)]
    assert chunks(net, 2, "looped", 2) == [(0, (0, 1)), (1, (2, 3)), (0, (4, 5)), (1, (6, 7))]
    assert chunks(net, 2, "v") == [(0, (0, 1)), (1, (2, 3)), (1, (4, 5)), (0, (6, 7))]
    assert chunks(net, 2, [1, 1, 0, 0, 0, 1, 1, 1]) == [(1, (0, 1)), (0, (2, 3, 4)), (1, (5, 6, 7))]
    assert chunks(net, 2, {f"s{i}": i % 2 for i in range(8)}) == [(i % 2, (i,)) for i in range(8)]


def test_stages_may_carry_their_devices() -> None:
    net = pipec.Pipeline("net")
    value = net.stage("a", None, net.input("x"))
    value = net.stage("b", None, value, device=1)
    value = net.stage("c", None, value)
    net.loss("l", None, net.stage("d", None, value, device=0))
    assert chunks(net, 2) == [(0, (0,)), (1, (1, 2)), (0, (3,))]
    with pytest.raises(
        pipec.ScheduleError, match="stages carry device=, so placement='v' cannot be given as well"
    ):
        place(net.spec, 2, "v")


def test_placement_balances_costs() -> None:
    costs = pipec.Costs(stages={"s0": {"forward": 10}})
    assert chunks(pipec.chain(5), 2, costs=costs) == [(0, (0,)), (1, (1, 2, 3, 4))]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.data())
@settings(max_examples=60)
def test_balance_is_optimal(weights: list[int], data: st.DataObject) -> None:
    from itertools import combinations

    parts = data.draw(st.integers(1, len(weights)))
    sizes = balance(weights, parts)
    assert len(sizes) == parts
    assert sum(sizes) == len(weights)
    assert min(sizes) >= 1

    def heaviest(cuts: tuple[int, ...]) -> int:
        bounds = (0, *cuts, len(weights))
        return max(sum(weights[a:b]) for a, b in itertools.pairwise(bounds))

    found = heaviest(tuple(np.cumsum(sizes)[:-1].tolist()))
    assert found == min(heaviest(cuts) for cuts in combinations(range(1, len(weights)), parts - 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"placement": "spiral"},
            "unknown placement 'spiral'; known are linear, looped, v, a mapping from stage names to "
            "devices, or one device per stage",
        ),
        ({"placement": 3}, "placement must be a name, a mapping or a list of devices, got 3"),
        ({"placement": [0, 1]}, "placement lists 2 devices, but pipeline 'chain' has 3 stages"),
        (
            {"placement": {"s0": 0, "s2": 1, "mid": 1}},
            "placement of pipeline 'chain': stage 's1' has no device; 'mid' is no stage",
        ),
        (
            {"placement": {"s0": 0, "s2": 1, "S-1": 1}},
            "placement of pipeline 'chain': stage 's1' has no device; 'S-1' is no stage (did you mean 's1'?)",
        ),
        (
            {"devices": 4},
            "pipeline 'chain' has 3 stages, too few for 4 devices, which need 4; compile for at most 3 devices "
            "or declare more stages",
        ),
        (
            {"placement": "v"},
            "pipeline 'chain' has 3 stages, too few for 2 devices with 2 chunks each, which need 4; compile "
            "for at most 1 device or declare more stages",
        ),
        ({"placement": "looped", "chunks": -1}, "chunks must be at least 1 per device, got -1"),
        ({"placement": "linear", "chunks": 2}, "placement 'linear' has 1 chunks per device, but chunks=2"),
        ({"devices": 0}, "devices must be a whole number of at least 1, got 0"),
        ({"microbatches": 1.5}, "microbatches must be a whole number of at least 1, got 1.5"),
        (
            {"recompute": "sometimes"},
            "recompute: unknown mode 'sometimes'; modes are never, always, except_last",
        ),
        (
            {"recompute": {"S_2": "always"}},
            "recompute: 'S_2' is no stage (did you mean 's2'?); modes are never, always, except_last",
        ),
        (
            {"recompute": {"mid": "always", "s0": "often"}},
            "recompute: 'mid' is no stage; unknown mode 'often'; modes are never, always, except_last",
        ),
        (
            {"recompute": 3},
            "recompute must be never, always, except_last, or a mapping from stage names, got 3",
        ),
        ({"update": "often"}, "update must be None, 'stage' or 'all', got 'often'"),
        ({"update": "all", "update_early": True}, "update_early=True needs update='stage', got update='all'"),
    ],
)
def test_choices_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(pipec.ScheduleError) as error:
        pipec.compile(pipec.chain(3), **{"devices": 2, "microbatches": 2} | options)
    assert str(error.value) == message


def test_devices_that_are_not_there_are_all_named() -> None:
    with pytest.raises(pipec.ScheduleError) as error:
        pipec.compile(pipec.chain(3), 3, placement=[0, 5, -1])
    lines = str(error.value).splitlines()
    assert lines[0] == "placement of pipeline 'chain': 4 problems"
    assert [line for line in lines if line.startswith("  ") and line[2].isdigit()] == [
        "  1. stage 's1': device 5 is not one of 0..2",
        "  2. stage 's2': device -1 is not one of 0..2",
        "  3. device 1 of 3 has no stage; compile for fewer devices",
        "  4. device 2 of 3 has no stage; compile for fewer devices",
    ]


def test_a_pipeline_without_a_loss_has_nothing_to_train() -> None:
    net = pipec.Pipeline("net")
    net.output(net.stage("a", None, net.input("x")))
    with pytest.raises(pipec.ScheduleError) as error:
        pipec.compile(net, 1)
    assert str(error.value) == (
        "pipeline 'net' declares no loss, so it has nothing to train; add loss(...) or compile with forward_only=True"
    )
    assert len(pipec.compile(net, 1, forward_only=True)) == 1


# -- order and linearise ---------------------------------------------------------------------------------------


def kinds(plan: Plan, device: int) -> str:
    return " ".join(str(task) for task in plan.compute(device))


def test_chunks_expand_to_stages_backwards_in_reverse() -> None:
    plan = pipec.compile(pipec.chain(4), 2, 1)
    assert [kinds(plan, d) for d in range(2)] == ["0F0 1F0 1B0 0B0", "2F0 3F0 3B0 2B0"]


def test_an_order_that_deadlocks_tells_where_every_device_stands() -> None:
    with pytest.raises(pipec.PlanError) as error:
        pipec.compile(
            pipec.chain(2),
            2,
            2,
            lambda p: [[F(0, 0), B(0, 0), F(0, 1), B(0, 1)], [F(1, 1), F(1, 0), B(1, 1), B(1, 0)]],
        )
    assert str(error.value) == "\n".join(
        [
            "schedule '<lambda>' deadlocks:",
            "  device 0 stands at 0B0, which waits for 1B0 (device 1)",
            "  device 1 stands at 1F1, which waits for 0F1 (device 0)",
        ]
    )


@given(plans())
@settings(max_examples=60)
def test_ids_are_an_execution_order(plan: Plan) -> None:
    tasks = np.repeat(np.arange(len(plan)), np.diff(plan.waits.start))
    assert (plan.waits.ids < tasks).all()
    assert all((np.diff(ids) > 0).all() for lanes in plan.lanes for ids in lanes)


@given(pipelines(), st.integers(0, 99), st.booleans())
@settings(max_examples=40)
def test_devices_keep_the_order_of_the_policy(net: pipec.Pipeline, seed: int, split: bool) -> None:
    """The compute lane holds exactly the policy's tasks, each stage of a one-stage chunk in its place."""
    stages = len(net.spec.stages)
    answer: list[Any] = []

    def policy(problem: Any) -> Any:
        answer.append(any_order(seed, split)(problem))
        return answer[-1]

    plan = pipec.compile(net, 1, 3, policy, placement="looped", chunks=stages)
    told = [(int(t.kind), t.stage, t.microbatch) for t in plan.compute(0)]
    wanted = [op for op in answer[0][0] if op[0] == 0 or plan.graph.stages[op[1]].backward]
    assert told == wanted


# -- recompute, updates, copies ---------------------------------------------------------------------------------


def counts(plan: Plan, kind: Kind) -> list[int]:
    own = plan.table.stage[plan.table.kind == kind]
    return np.bincount(own[own >= 0], minlength=len(plan.graph.stages)).tolist()


def test_recompute_modes_say_how_often() -> None:
    """M = 4: never 0, except_last M - 1 on every stage, always M; M = 1 with except_last recomputes nothing."""
    for schedule in ("gpipe", "1f1b"):
        for mode, often in (("never", 0), ("except_last", 3), ("always", 4)):
            plan = pipec.compile(pipec.chain(2), 2, 4, schedule, recompute=mode)
            assert counts(plan, Kind.RECOMPUTE) == [often, often]
        assert counts(
            pipec.compile(pipec.chain(2), 2, 1, schedule, recompute="except_last"), Kind.RECOMPUTE
        ) == [0, 0]
    plan = pipec.compile(pipec.chain(3), 3, 4, recompute={"s1": "always", "s2": "except-last"})
    assert plan == pipec.compile(pipec.chain(3), 3, 4, recompute={"s1": "always", "s2": "except_last"})
    assert counts(plan, Kind.RECOMPUTE) == [0, 4, 3]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
def test_except_last_spares_the_microbatch_whose_forward_comes_last(order: list[int]) -> None:
    """On the last stage its backward follows at once, in whatever order the schedule takes the microbatches."""
    tasks = [[F(c, m) for m in order] + [B(c, m) for m in reversed(order)] for c in range(2)]
    plan = pipec.compile(pipec.chain(2), 2, 3, lambda p: tasks, recompute="except_last")
    for stage in range(2):
        again = plan.table.microbatch[(plan.table.kind == Kind.RECOMPUTE) & (plan.table.stage == stage)]
        assert sorted(again.tolist()) == sorted(order[:-1])


def test_a_recompute_stands_right_before_its_backward_and_waits_for_no_gradient() -> None:
    plan = pipec.compile(pipec.chain(2), 2, 3, recompute="always")
    lane = [str(t) for t in plan.compute(0)]
    assert all(lane[i + 1] == f"0B{lane[i][2:]}" for i in range(len(lane)) if lane[i].startswith("0R"))
    again = np.flatnonzero(plan.table.kind == Kind.RECOMPUTE)
    assert all(len(plan.waits.of(int(task))) == 0 for task in again)


def test_recompute_keeps_activations_only_from_recompute_to_backward() -> None:
    plan = pipec.compile(pipec.chain(2), 2, 4, "gpipe", recompute="always")
    saved = plan.buffers.kind == Buffer.ACTIVATION
    assert set(plan.table.kind[plan.buffers.writer[saved]]) == {int(Kind.RECOMPUTE)}
    assert plan.simulate().peak_share == [1.0, 1.0]


def test_updates() -> None:
    stage = pipec.compile(pipec.chain(3), 3, 2, update="stage")
    assert counts(stage, Kind.UPDATE) == [1, 1, 1]
    everything = pipec.compile(pipec.chain(3), 3, 2, update="all")
    ids = np.flatnonzero(everything.table.kind == Kind.UPDATE)
    assert [str(everything.table.task(int(i))) for i in ids] == ["U0"]
    early = pipec.compile(pipec.chain(3), 3, 2, update="stage", update_early=True)
    assert kinds(early, 2).endswith("2B1 2U0")
    timeline = early.simulate(pipec.Costs(update=1))
    last = int(np.flatnonzero((early.table.kind == Kind.UPDATE) & (early.table.stage == 2))[0])
    assert timeline.end[last] < timeline.makespan


def test_a_value_is_copied_once_per_reading_device_and_its_gradient_comes_back_once() -> None:
    """Stage 0 is read by 1 (here), 2 and 3 (device 1), 4 (device 2)."""
    net = pipeline([[-1], [0], [0, 1], [0, 2], [0, 3]], [4])
    plan = pipec.compile(net, 3, 1, placement=[0, 0, 1, 1, 2])
    copies = [str(plan.table.task(int(i))) for i in np.flatnonzero(plan.table.kind == Kind.COPY)]
    assert sorted(c for c in copies if "v0" in c) == ["dv0[0]:1>0", "dv0[0]:2>0", "v0[0]:0>1", "v0[0]:0>2"]


@given(plans())
@settings(max_examples=60)
def test_copies_go_straight_and_once(plan: Plan) -> None:
    homes = [plan.stage_device(s) for s in range(len(plan.graph.stages))]
    wanted = set()
    for v, info in enumerate(plan.graph.values):
        home = homes[info.producer]
        for m in range(plan.microbatches):
            wanted |= {(v, False, home, homes[r], m) for r in info.readers if homes[r] != home}
            if plan.training:
                wanted |= {
                    (v, True, homes[r], home, m) for r in plan.graph.gradient_readers(v) if homes[r] != home
                }
    table = plan.table
    rows = [
        (
            int(table.value[i]),
            bool(table.gradient[i]),
            int(table.device[i]),
            int(table.peer[i]),
            int(table.microbatch[i]),
        )
        for i in np.flatnonzero(table.kind == Kind.COPY)
    ]
    assert len(rows) == len(set(rows))
    assert set(rows) == wanted


def test_a_value_leaves_its_producer_when_its_copies_have_left() -> None:
    plan = pipec.compile(pipec.chain(2), 2, 2, "gpipe")
    home = (plan.buffers.kind == Buffer.VALUE) & (plan.buffers.device == 0)
    assert set(plan.table.kind[plan.buffers.free[home]]) == {int(Kind.COPY)}


# -- forward plans ----------------------------------------------------------------------------------------------


def test_forward_plan_keeps_the_placement() -> None:
    plan = pipec.compile(unet(), 2, 4, placement=[0, 1, 1, 1, 0], recompute="always", update="all")
    forward = forward_plan(plan, 2)
    assert set(forward.table.kind) == {int(Kind.FORWARD), int(Kind.COPY)}
    assert forward.chunks == plan.chunks
    assert (forward.microbatches, forward.training) == (2, False)
    assert all(len(forward.lanes[d][Lane.COMPUTE]) for d in range(2))
    forward.verify()


def test_views() -> None:
    plan = pipec.compile(pipec.chain(2), 2, 2)
    tasks = plan.tasks
    assert [len(view) for view in tasks] == [8, 8]
    assert str(tasks[0][0]) == "0F0"
    assert tasks[0][-1].kind is Kind.BACKWARD
    assert [str(t) for t in tasks[1][:2]] == ["v0[0]:0>1", "v0[1]:0>1"]
    assert repr(plan.compute(1)) == "(1F0 1B0 1F1 1B1)"
    assert repr(plan) == "<Plan 'chain': 1f1b, 2 devices, 2 microbatches, 2 stages, 12 tasks>"
