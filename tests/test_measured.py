"""Costs from measured timelines: a simulated one that is taken for measured gives back what it was simulated with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import chain, data
from plans import plans

import pipec
from pipec.errors import SpecError
from pipec.ir import BACKWARDS, Kind, Plan
from pipec.measured import NAMES, latency
from pipec.timeline import Timeline


def as_measured(timeline: Timeline, moved: Any = 0.0) -> Timeline:
    """The same times as if a clock had given them; ``moved``: what each device's clock is ahead."""
    plan = timeline.plan
    ahead = np.broadcast_to(np.asarray(moved, float), plan.devices)[plan.table.device]
    return Timeline(plan, pipec.Costs(unit="ms"), timeline.start + ahead, timeline.end + ahead, timeline.cause, True)


@st.composite
def costs_for(draw: Any, plan: Plan) -> pipec.Costs:
    times = st.integers(1, 40).map(lambda n: n / 8)
    stages = {}
    for stage in plan.graph.stages:
        one, other = draw(times), draw(times)
        stages[stage.name] = pipec.StageCosts(
            forward=draw(times), backward_input=one, backward_weight=other, backward=one + other,
            recompute=draw(times), update=draw(times),
        )
    return pipec.Costs(stages=stages, latency=draw(st.integers(0, 8)) / 8)


@given(st.data())
def test_what_is_measured_is_what_it_was_simulated_with(draw: Any) -> None:
    plan = draw.draw(plans())
    costs = draw.draw(costs_for(plan))
    simulated = plan.simulate(costs)
    found = as_measured(simulated).to_costs(pipec.Costs(latency=costs.latency))
    table = plan.table
    shared_update = bool(((table.kind == Kind.UPDATE) & (table.stage < 0)).any())
    for number, stage in enumerate(plan.graph.stages):
        ran = {Kind(kind) for kind in table.kind[table.stage == number].tolist()}
        for kind in ran & set(NAMES):
            if kind in BACKWARDS and {Kind.BACKWARD, Kind.BACKWARD_WEIGHT} <= ran:
                continue  # the whole and the halves are those of different microbatches
            assert found.duration(kind, stage.name) == pytest.approx(costs.duration(kind, stage.name)), kind
    assert found.latency == pytest.approx(costs.latency)
    assert found.unit == "ms"
    if not shared_update:
        assert plan.simulate(found).makespan == pytest.approx(simulated.makespan)


def chained(stages: int, schedule: str = "1f1b", **options: Any) -> Plan:
    return pipec.compile(pipec.chain(stages), stages, 6, schedule, **options)


def test_clocks_that_differ_between_hosts_cancel() -> None:
    plan = chained(2)
    simulated = plan.simulate(pipec.Costs(latency=0.25, forward=2.0, backward=4.0))
    for moved in (0.0, 0.1, -0.1):
        assert latency(as_measured(simulated, [0.0, moved]), pipec.Costs()) == pytest.approx(0.25)


def test_a_transfer_is_not_latency() -> None:
    plan = chained(3)
    base = pipec.Costs(bandwidth=1000.0, values={"s0": 500, "s1": 250}, unit="ms")
    simulated = plan.simulate(pipec.Costs(latency=0.5, bandwidth=1000.0, values=base.values))
    assert as_measured(simulated).to_costs(base).latency == pytest.approx(0.5)
    assert as_measured(simulated).to_costs(base).bandwidth == 1000.0


def test_slices_of_a_microbatch_add_up() -> None:
    plan = pipec.compile(pipec.chain(2, carry=True), 2, 4, "seq-1f1b", slices=2)
    costs = pipec.Costs(forward=3.0, backward_input=2.0, backward_weight=2.0)
    found = as_measured(plan.simulate(costs)).to_costs()
    assert found.duration(Kind.FORWARD, "s0") == pytest.approx(3.0)
    assert found.duration(Kind.BACKWARD, "s1") == pytest.approx(4.0)


def test_halves_that_did_not_run_keep_their_proportion() -> None:
    whole = as_measured(chained(2).simulate(pipec.Costs(backward=6.0)))
    base = pipec.Costs(backward_input=1.0, backward_weight=2.0, unit="ms")
    assert whole.to_costs(base).duration(Kind.BACKWARD_INPUT, "s0") == pytest.approx(2.0)
    assert whole.to_costs(base).duration(Kind.BACKWARD_WEIGHT, "s0") == pytest.approx(4.0)
    assert whole.to_costs().duration(Kind.BACKWARD_WEIGHT, "s0") == pytest.approx(3.0)
    halves = as_measured(chained(2, "zb-h1").simulate(pipec.Costs(backward_input=1.5, backward_weight=0.5)))
    assert halves.to_costs().duration(Kind.BACKWARD, "s0") == pytest.approx(2.0)


def test_the_middle_of_the_microbatches_counts() -> None:
    plan = chained(2)
    line = as_measured(plan.simulate(pipec.Costs(forward=2.0)))
    first = int(np.flatnonzero((plan.table.kind == Kind.FORWARD) & (plan.table.stage == 0))[0])
    line.start[first] -= 100.0  # a first call, which takes long
    assert line.to_costs().duration(Kind.FORWARD, "s0") == pytest.approx(2.0)


def test_an_update_of_all_stages_is_shared_out() -> None:
    plan = chained(2, update="all")
    found = as_measured(plan.simulate(pipec.Costs(update=1.5))).to_costs()
    assert [found.duration(Kind.UPDATE, name) for name in ("s0", "s1")] == pytest.approx([1.5, 1.5])


def test_mistakes() -> None:
    plan = chained(2)
    with pytest.raises(SpecError, match=r"to_costs\(\) is for a measured timeline, run.trace\(\)"):
        plan.simulate().to_costs()
    line = as_measured(plan.simulate())
    with pytest.raises(SpecError, match="base is in s; convert it"):
        line.to_costs(pipec.Costs(unit="s"))
    with pytest.raises(SpecError, match="stage 'nobody'"):
        line.to_costs(pipec.Costs(stages={"nobody": {"forward": 1.0}}))


def test_a_run_says_what_other_schedules_would_take() -> None:
    net = chain(4)
    batch = data(8)
    profiled = pipec.profile(net, microbatches=4, **batch)
    with pipec.Runner(net, pipec.compile(net, 2, 4)) as run:
        run.step(**batch)
        found = run.trace().to_costs(profiled)
    assert found.stages.keys() == profiled.stages.keys()
    assert all(own.forward and own.backward_input and own.backward_weight for own in found.stages.values())
    assert found.values == profiled.values
    assert pipec.compile(net, 2, 8, "zb-h1", costs=found).simulate().makespan > 0
