"""Schedules with split backwards: any devices, microbatches, costs, placement and limit; and what a limit costs."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import pipelines

import pipec
from pipec.ir import BACKWARDS, Chunk, Kind
from pipec.schedules import REGISTRY
from pipec.schedules.base import Problem
from pipec.schedules.greedy import Keep, run
from pipec.schedules.rhythm import SAFE, Rhythm, best_order, laps_of, rehearsal, rules, slots
from pipec.schedules.zb_h1 import delayed_weights
from pipec.schedules.zb_v import HALF, NARROW, WIDE

MIXED = ["dualpipe-v"]  # some backwards whole, some in halves
SPLIT = [name for name, make in REGISTRY.items() if getattr(make(), "split", False) and name not in MIXED]
CAPS = {
    "zb-h1": lambda P: P, "zb-h2": lambda P: 2 * P - 1, "zb-1p": lambda P: P, "zb-2p": lambda P: 2 * P,
    "interleaved-zero-bubble": lambda P: P, "zb-v": lambda P: P, "v-half": lambda P: (P + 2) // 2,
    "v-min": lambda P: (P + 4) // 3, "wave": lambda P: P,
}
UNEVEN = pipec.Costs(forward=1.0, backward_input=0.75, backward_weight=1.5, latency=0.125)


def quick(schedule):
    """The policy; where it polishes, by a few moves: what every order must keep to does not take a long search."""
    policy = REGISTRY[schedule]()
    return evolve(policy, moves=100) if hasattr(policy, "moves") else policy


def chain(devices, microbatches, costs=None):
    """A problem with one chunk per entry of ``devices``, each fed by the one before."""
    chunks = tuple(Chunk(n, device, (n,)) for n, device in enumerate(devices))
    edges = tuple((n, n + 1) for n in range(len(devices) - 1))
    names = tuple(f"s{n}" for n in range(len(devices)))
    return Problem(chunks, max(devices) + 1, microbatches, edges, costs or pipec.Costs(), names)


def vee(P):
    return [*range(P), *reversed(range(P))]


def kinds_of(plan):
    return {Kind(kind) for kind in np.unique(plan.table.kind)} & set(BACKWARDS)


def check(plan, cap):
    """Each half of each backward once, every kind in microbatch order per stage, and no more than ``cap`` held."""
    split = plan.schedule in SPLIT
    assert kinds_of(plan) == ({Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT} if split else {Kind.BACKWARD})
    table = plan.table
    for stage in range(len(plan.graph.stages)):
        for kind in (Kind.FORWARD, *kinds_of(plan)):
            rows = (table.stage == stage) & (table.kind == kind)
            assert table.microbatch[rows].tolist() == list(range(plan.microbatches))
    assert max(plan.simulate().peak_share) <= min(cap, plan.microbatches) + 1e-9


def test_the_split_schedules_are_known():
    assert sorted([*SPLIT, "wave"]) == sorted(CAPS)


@pytest.mark.parametrize("schedule", CAPS)
def test_any_devices_and_microbatches(schedule):
    per = 1 if REGISTRY[schedule]().placement == "linear" else 2
    for P, M, costs in product((1, 2, 3, 5), (1, 2, 3, 4, 9), (None, UNEVEN)):
        check(pipec.compile(pipec.chain(P * per), P, M, quick(schedule), costs=costs), CAPS[schedule](P))


@pytest.mark.parametrize("schedule", [name for name in CAPS if name not in ("zb-h1", "zb-h2")])
@pytest.mark.parametrize("placement", ["linear", "looped", "v", [0, 1, 2, 0, 2, 1], [2, 1, 1, 0, 2, 0]])
def test_any_placement_under_any_limit(schedule, placement):
    for M, cap in product((1, 4, 7), (1, 1.5, 2, 3)):
        plan = pipec.compile(
            pipec.chain(6), 3, M, quick(schedule), placement=placement, costs=UNEVEN,
            memory_limit=pipec.activations(cap),
        )
        check(plan, cap)


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-h2"])
def test_hand_made_lists_keep_to_a_limit(schedule):
    for P, M, cap in product((1, 2, 4), (1, 3, 8), (1, 2, 3)):
        check(pipec.compile(pipec.chain(P), P, M, schedule, memory_limit=pipec.activations(cap)), cap)


@pytest.mark.parametrize("schedule", CAPS)
def test_less_than_one_activation_is_refused(schedule):
    with pytest.raises(pipec.ScheduleError) as error:
        pipec.compile(pipec.chain(4), 2, 4, schedule, memory_limit=pipec.activations(0.5))
    assert str(error.value) == (
        "memory: the limit of 0.5 activations is below one, but a device holds all that it saves for a microbatch at "
        "once; give at least activations(1)"
    )


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_graph_costs_and_limit(data):
    """Skips, several losses, stages without backward, mapped placements: the run ends and holds what it may."""
    net = data.draw(pipelines(most=6))
    names = [stage.name for stage in net.spec.stages]
    devices = data.draw(st.integers(1, min(3, len(names))))
    extra = data.draw(st.lists(st.integers(0, devices - 1), min_size=len(names) - devices,
                               max_size=len(names) - devices))
    placement = dict(zip(names, data.draw(st.permutations([*range(devices), *extra])), strict=True))
    amount = st.sampled_from([0.0, 0.5, 1.0, 3.0])
    costs = pipec.Costs(latency=data.draw(amount), stages={
        name: {"forward": data.draw(amount), "backward_input": data.draw(amount), "backward_weight": data.draw(amount)}
        for name in names
    })
    schedule = data.draw(st.sampled_from([name for name in CAPS if name not in ("zb-h1", "zb-h2")]))
    cap = data.draw(st.sampled_from([1.0, 1.5, 2.0, 5.0]))
    plan = pipec.compile(net, devices, data.draw(st.integers(1, 6)), quick(schedule), placement=placement, costs=costs,
                         memory_limit=pipec.activations(cap))
    assert max(plan.simulate().peak_share) <= cap + 1e-9


def test_the_costs_change_the_order():
    """An expensive weight half is worth waiting with; one order cannot serve both."""
    cheap, dear = pipec.Costs(backward_weight=0.25), pipec.Costs(backward_weight=2.0, latency=0.5)
    plans = [pipec.compile(pipec.chain(8), 4, 8, "zb-v", costs=costs) for costs in (cheap, dear)]
    assert plans[0].table != plans[1].table
    for plan, other in (plans, reversed(plans)):
        assert plan.simulate().makespan <= other.simulate(plan.costs).makespan


def test_unequal_stages():
    """A device with twice the work sets the pace, and the split schedule keeps it busier than 1f1b does."""
    costs = pipec.Costs(stages={"s1": {"forward": 2.0, "backward_input": 2.0, "backward_weight": 2.0}})
    auto, plain = (pipec.compile(pipec.chain(4), 4, 12, name, costs=costs).simulate() for name in ("zb-1p", "1f1b"))
    assert 12 * 6 < auto.makespan < plain.makespan
    assert auto.busy[1] > plain.busy[1]


def test_orders_in_print():
    plan = pipec.compile(pipec.chain(3), 3, 4, "zb-h1")
    assert [" ".join(map(str, plan.compute(d))) for d in range(3)] == [
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
        "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3",
        "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3",
    ]
    assert len(delayed_weights(0, 9, 5, 3)) == 9


def replay(problem, lists):
    """Makespan and largest number of activations per device of ``lists``, task by task."""
    ends, free, at = {}, [0.0] * problem.devices, [0] * problem.devices
    held, peak = [0] * problem.devices, [0] * problem.devices
    moved = True
    while moved:
        moved = False
        for device, row in enumerate(lists):
            while at[device] < len(row):
                kind, c, m = row[at[device]]
                if kind == Kind.FORWARD:
                    needs = [(0, a, m) for a, b in problem.edges if b == c]
                elif kind == Kind.BACKWARD_WEIGHT:
                    needs = [(3, c, m)]
                else:
                    needs = [(0, c, m), *((3, b, m) for a, b in problem.edges if a == c)]
                if any(need not in ends for need in needs):
                    break
                away = [problem.chunks[need[1]].device != device for need in needs]
                start = max([free[device], *(ends[n] + problem.costs.latency * a
                                             for n, a in zip(needs, away, strict=True))])
                free[device] = start + problem.cost(Kind(kind), c)
                ends[3 if kind == Kind.BACKWARD else kind, c, m] = free[device]
                held[device] += (kind == Kind.FORWARD) - (kind in (Kind.BACKWARD_WEIGHT, Kind.BACKWARD))
                peak[device] = max(peak[device], held[device])
                at[device] += 1
                moved = True
    assert at == [len(row) for row in lists]
    return max(free), peak


def test_a_run_tells_its_own_makespan_and_keeps_its_caps():
    rnd = random.Random(11)
    ended = 0
    for _ in range(150):
        P, M = rnd.randint(1, 5), rnd.randint(1, 8)
        devices = rnd.choice([list(range(P)), vee(P), [*range(P)] * 2])
        costs = pipec.Costs(*(rnd.choice([0.5, 1.0, 1.5]) for _ in range(3)), latency=rnd.choice([0.0, 0.25]))
        problem = chain(devices, M, costs)
        rhythm = evolve(
            rnd.choice([*WIDE, *HALF, *NARROW]), window=rnd.choice([0, 3, 100]), keep=rnd.choice(list(Keep))
        )
        caps = [rnd.randint(len(problem.on(d)), 2 * P + 1) if P > 1 else 4 for d in range(P)]
        outcome = run(problem, caps, rules(problem, rhythm, split=rnd.random() < 0.8))
        if outcome is not None:
            ended += 1
            makespan, peak = replay(problem, outcome.lists)
            assert outcome.makespan == pytest.approx(makespan)
            assert all(found <= cap for found, cap in zip(peak, caps, strict=True))
        assert run(problem, caps, rules(problem, SAFE)) is not None
    assert ended > 75


def test_rhythms_never_put_two_tasks_into_one_slot():
    for P, rhythm in product(range(1, 12), (*WIDE, *HALF, *NARROW)):
        problem = chain(vee(P), 1)
        (forwards, inputs), period = slots(problem, rhythm)
        for device in range(P):
            own = [row[c] % period for row in (forwards, inputs) for c in problem.on(device)]
            assert len(set(own)) == len(own)


def test_a_rhythm_that_comes_to_a_stand_is_left_out():
    problem = chain(vee(4), 6)
    stuck = Rhythm((1, 1), (1, 1), (1, 1, 1), window=0, keep=Keep.ORDER)
    assert run(problem, [2] * 4, rules(problem, stuck)) is None
    assert replay(problem, best_order(problem, 1, (stuck,)))[1] == [2] * 4


def test_large_problems_are_rehearsed_on_eight_devices():
    problem = evolve(chain(vee(20), 200), costs=pipec.Costs(forward=0.5))
    small, caps = rehearsal(problem, [40] * 20)
    assert (small.devices, small.microbatches, caps) == (8, 32, [16] * 8)
    assert [chunk.device for chunk in small.chunks] == vee(8)
    assert laps_of(small) == [0] * 8 + [1] * 8
    assert small.cost(Kind.FORWARD, 3) == 0.5
    makespan, peak = replay(problem, REGISTRY["zb-v"]().order(problem))
    assert max(peak) <= 40
    assert makespan <= 200 * 5 * 1.03  # 200 microbatches of two chunks at 0.5 + 1 + 1
