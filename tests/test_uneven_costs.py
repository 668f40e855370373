"""Schedules under costs other than F = B = W = 1: unequal tasks, unequal stages, hand-overs; and many microbatches."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

import pipec
from pipec.schedules import SCHEDULES
from pipec.schedules.base import Problem
from pipec.schedules.played import play
from pipec.timeline import Timeline

UNIT, NEAR = (1.0, 1.0, 1.0), (1.0, 1.125, 0.875)
DURATIONS = [(1.0, 2.0, 1.0), (1.0, 1.0, 2.0), (2.0, 1.0, 1.0), (1.0, 1.0, 0.2)]
STAGES = {  # work of each of eight stages
    "equal": [1.0] * 8, "dear last": [*[1.0] * 7, 2.0], "drawn": [0.5, 2.0, 1.0, 1.5, 1.5, 0.5, 2.0, 1.0],
}


def costs_of(durations: tuple[float, ...], work: list[float], latency: float) -> pipec.Costs:
    names = ("forward", "backward_input", "backward_weight")
    return pipec.Costs(latency=latency, stages={
        f"s{number}": dict(zip(names, (d * w / 2 for d in durations), strict=True)) for number, w in enumerate(work)
    })


ALL = [costs_of(*case) for case in product(DURATIONS, STAGES.values(), (0.0, 0.3))]


def unpolished(schedule: str) -> Any:
    """The policy without its search for shorter orders, which takes long and never makes one longer."""
    policy = SCHEDULES[schedule]()
    return evolve(policy, moves=0) if hasattr(policy, "moves") else policy


@cache
def makespan(schedule: str, case: int, placement: str | None = None) -> float:
    policy = unpolished(schedule)
    return pipec.compile(pipec.chain(8), 4, 8, policy, placement=placement, costs=ALL[case]).simulate().makespan


@pytest.mark.parametrize(
    ("schedule", "placement", "other", "worst", "mean"),
    [
        ("zb-h1", "linear", "1f1b", 1.0, 0.90),
        ("zb-h2", "linear", "1f1b", 1.0, 0.88),
        ("zb-1p", "linear", "1f1b", 1.0, 0.90),
        ("zb-2p", "linear", "1f1b", 1.0, 0.86),
        ("zb-v", "v", "1f1b", 1.0, 0.89),
        ("wave", "v", "1f1b", 1.02, 0.97),
        ("dualpipe-v", "v", "1f1b", 1.1, 0.96),  # its lists do not look at costs
        ("v-half", "v", "1f1b", 1.15, 0.93),  # in half the memory
        ("interleaved-zero-bubble", "looped", "interleaved-1f1b", 1.2, 0.95),  # holds P, the other P + (P-1)/v
    ],
)
def test_split_backwards_pay_under_any_costs(
    schedule: str, placement: str, other: str, worst: float, mean: float
) -> None:
    """Step times relative to the same placement with whole backwards: at worst, and on average."""
    ratios = [
        makespan(schedule, case, placement) / makespan(other, case, placement) for case in range(len(ALL))
    ]
    assert max(ratios) <= worst + 1e-9
    assert sum(ratios) / len(ratios) <= mean


@pytest.mark.parametrize(
    ("schedule", "least", "mean"),
    [("zb-1p", 1.0, 1.0), ("zb-2p", 1.0, 1.002), ("zb-v", 1.0, 1.01), ("wave", 0.97, 1.01),
     ("interleaved-zero-bubble", 0.99, 1.01)],
)
def test_policies_look_at_the_costs(schedule: str, least: float, mean: float) -> None:
    """An order made for the costs against the one made for F = B = W = 1: shorter on average, hardly ever longer."""
    plain = pipec.compile(pipec.chain(8), 4, 8, unpolished(schedule))
    gains = [plain.simulate(costs).makespan / makespan(schedule, case) for case, costs in enumerate(ALL)]
    assert min(gains) >= least - 1e-9
    assert sum(gains) / len(gains) >= mean


@pytest.mark.parametrize("durations", [UNIT, NEAR])
@pytest.mark.parametrize(("P", "M"), [(2, 21), (3, 31), (4, 41), (5, 23), (8, 64)])
def test_closed_forms_hold_for_many_microbatches(P: int, M: int, durations: tuple[float, float, float]) -> None:
    forward, inputs, weights = durations

    def line(schedule: str, v: int = 1) -> Timeline:
        costs = pipec.Costs(*(part / v for part in durations))
        return pipec.compile(pipec.chain(P * v), P, M, schedule, costs=costs).simulate()

    for schedule in ("zb-h1", "zb-1p"):
        assert line(schedule).bubble_time == pytest.approx((P - 1) * (forward + inputs - weights))
    fast = line("zb-h2")
    assert fast.span - M * sum(durations) == pytest.approx(max(0.0, (P - 1) * (forward + inputs - 2 * weights)))
    if durations == UNIT:
        assert line("wave", 2).bubble_time == pytest.approx(2 * (P - 1))
        assert line("zb-v", 2).bubble_time == pytest.approx((P - 1) / 2)
        if P in (4, 8):
            assert line("v-half", 2).bubble_time <= 1.5 * P - 3.5 + 1e-9
            assert line("v-min", 2).bubble_time <= {4: 5.5, 8: 13.5}[P] + 1e-9


class Levelled:
    """The order that a policy makes as if all tasks were equally long."""

    def __init__(self, policy: Any) -> None:
        self.policy, self.placement, self.split = policy, policy.placement, getattr(policy, "split", False)
        self.chunks = getattr(policy, "chunks", None)

    def order(self, problem: Problem) -> Any:
        return self.policy.order(evolve(problem, costs=pipec.Costs()))


@pytest.mark.parametrize("schedule", ["wave", "interleaved-zero-bubble", "zb-v", "v-half", "v-min", "zb-1p", "zb-2p"])
def test_knowing_the_costs_never_costs_time(schedule: str) -> None:
    stages = 4 if schedule in ("zb-1p", "zb-2p") else 8
    for work, durations, latency, microbatches in product(
        ([1.0] * 8, STAGES["drawn"]), (NEAR, (1.0, 2.0, 1.0), (1.0, 1.0, 0.3)), (0.0, 0.1), (8, 16)
    ):
        costs, net = costs_of(durations, work[:stages], latency), pipec.chain(stages)
        known, blind = (
            pipec.compile(net, 4, microbatches, policy, costs=costs).simulate().makespan
            for policy in (unpolished(schedule), Levelled(unpolished(schedule)))
        )
        assert known <= blind + 1e-9


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_lists_played_at_costs_take_what_the_simulator_says(data: st.DataObject) -> None:
    numbers = st.sampled_from([0.0, 0.25, 1.0, 2.0])
    costs = pipec.Costs(latency=data.draw(numbers), stages={
        f"s{n}": {name: data.draw(numbers) + 0.1 for name in ("forward", "backward_input", "backward_weight")}
        for n in range(6)
    })
    schedule = data.draw(st.sampled_from(["wave", "zb-v", "interleaved-1f1b", "interleaved-zero-bubble"]))
    seen: list[Any] = []

    class Seen(Levelled):
        def order(self, problem: Problem) -> Any:
            rows = [[*row] for row in super().order(problem)]
            seen.append(play(problem, rows))
            assert seen[-1].lists == rows
            return rows

    plan = pipec.compile(pipec.chain(6), 3, 4, Seen(unpolished(schedule)), costs=costs)
    timeline = plan.simulate()
    assert seen[-1].makespan == pytest.approx(timeline.makespan)
    assert seen[-1].span == pytest.approx(timeline.span)
