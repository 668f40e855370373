"""The simulator against closed forms, figures of other schedulers, and a second simulator of another design."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import pipeline, plans, unet

import pipec
from pipec.ir import BACKWARDS, Buffer, Kind, Lane, Plan
from pipec.timeline import Timeline, show_bytes


def compiled(
    devices: int, microbatches: int, schedule: str, costs: pipec.Costs | None = None, **options: Any
) -> Timeline:
    return pipec.compile(pipec.chain(devices), devices, microbatches, schedule, **options).simulate(costs)


SHAPES = [(1, 1), (1, 5), (2, 1), (2, 2), (3, 2), (4, 8), (4, 3), (8, 16), (5, 7)]


# -- closed forms: F, B, W of a stage; P devices, M microbatches; c the latency of one hand-over ----------------


@pytest.mark.parametrize(("P", "M"), SHAPES)
@pytest.mark.parametrize(
    ("F", "B", "W", "c"), [(1, 1, 1, 0), (2, 3, 0.5, 0), (1, 1, 1, 0.25), (18.522, 18.086, 9.337, 0.601)]
)
def test_gpipe_bubble(P: int, M: int, F: float, B: float, W: float, c: float) -> None:
    """Bubble (P-1)(F+B+W) + 2(P-1)c; a device holds M activations (GPipe, arXiv 1811.06965, section 2.3)."""
    timeline = compiled(P, M, "gpipe", pipec.Costs(F, B, W, latency=c))
    assert timeline.bubble_time == pytest.approx((P - 1) * (F + B + W) + 2 * (P - 1) * c)
    assert timeline.makespan == pytest.approx(M * (F + B + W) + (P - 1) * (F + B + W) + 2 * (P - 1) * c)
    assert timeline.peak_share == [float(M)] * P


@pytest.mark.parametrize(("P", "M"), SHAPES)
@pytest.mark.parametrize(("F", "B", "W"), [(1, 1, 1), (2, 3, 0.5), (1, 2, 0)])
def test_1f1b_bubble(P: int, M: int, F: float, B: float, W: float) -> None:
    """The bubble of GPipe at c = 0; device s holds min(M, P - s) activations (arXiv 2104.04473, section 2.2)."""
    timeline = compiled(P, M, "1f1b", pipec.Costs(F, B, W))
    assert timeline.bubble_time == pytest.approx((P - 1) * (F + B + W))
    assert timeline.peak_share == [float(min(M, P - s)) for s in range(P)]


@pytest.mark.parametrize(
    ("cost", "P", "M", "makespan"),
    [
        ((1, 1, 1, 0), 4, 8, 33.0),
        ((1, 1, 1, 0), 8, 16, 69.0),
        ((1, 1, 1, 0.1), 4, 8, 34.6),
        ((1, 18.086 / 18.522, 9.337 / 18.522, 0.601 / 18.522), 8, 32, 98.95),
    ],
)
def test_1f1b_makespan_of_other_schedulers(cost: tuple[float, ...], P: int, M: int, makespan: float) -> None:
    """Costs F, B, W and latency c. With c > 0 the steady state of 1F1B pays hand-overs that no closed form gives."""
    timeline = compiled(P, M, "1f1b", pipec.Costs(*cost[:3], latency=cost[3]))
    assert timeline.makespan == pytest.approx(makespan, abs=0.005)


@pytest.mark.parametrize(
    ("P", "M", "cost", "rate"),
    [
        (8, 24, (18.522, 18.086, 9.337, 0.601), 0.2431),
        (8, 64, (18.546, 18.097, 9.321, 0.762), 0.1240),
        (8, 32, (29.802, 29.428, 19.530, 0.577), 0.1898),
        (16, 48, (11.347, 11.248, 8.132, 0.377), 0.2552),
        (32, 96, (10.419, 10.207, 7.715, 0.408), 0.2646),
        (32, 256, (10.402, 10.248, 7.698, 0.460), 0.1352),
    ],
)
def test_1f1b_bubble_rates_of_the_zero_bubble_paper(
    P: int, M: int, cost: tuple[float, ...], rate: float
) -> None:
    """Rate 1 - M(F+B+W)/span with the profiled costs of arXiv 2401.10241, tables 5 and 9."""
    F, B, W, c = cost
    timeline = compiled(P, M, "1f1b", pipec.Costs(F, B, W, latency=c))
    assert 1 - M * (F + B + W) / timeline.span == pytest.approx(rate, abs=5e-5)


# -- a second simulator ----------------------------------------------------------------------------------------


def slow_clock(plan: Plan, costs: pipec.Costs) -> tuple[list[float], list[float]]:
    """Start and end per task, by relaxing "starts no earlier than" until nothing moves.

    Shares no code with the simulator: durations, lanes and arrivals are worked out task by task.
    """
    names = [s.name for s in plan.graph.stages]
    tasks = [plan.table.task(i) for i in range(len(plan))]
    trained = {t.stage for t in tasks if t.kind in BACKWARDS}

    def duration(task: Any) -> float:
        if task.kind is Kind.COPY:
            value = plan.graph.values[task.value]
            size = costs.value_bytes(value.name, names[value.producer])
            return 0.0 if costs.bandwidth is None else float(size or 0) / costs.bandwidth
        if task.kind is Kind.UPDATE and task.stage < 0:
            return sum(costs.duration(Kind.UPDATE, names[s]) for s in trained)
        return costs.duration(task.kind, names[task.stage])

    spans = [duration(t) for t in tasks]
    arrival = [costs.latency if t.kind is Kind.COPY else 0.0 for t in tasks]
    before: list[list[tuple[int, float]]] = [
        [(int(w), arrival[int(w)]) for w in plan.waits.of(i)] for i in range(len(plan))
    ]
    for lanes in plan.lanes:
        for lane in Lane:
            on_lane = [i for i in lanes[lane].tolist() if lane is Lane.COMPUTE or spans[i] > 0]
            for earlier, later in itertools.pairwise(on_lane):
                before[later].append((earlier, 0.0))
    start = [0.0] * len(plan)
    moved = True
    while moved:
        moved = False
        for i in range(len(plan)):
            least = max((start[b] + spans[b] + late for b, late in before[i]), default=0.0)
            if least > start[i] + 1e-12:
                start[i], moved = least, True
    return start, [a + b for a, b in zip(start, spans, strict=True)]


@st.composite
def costs_of(draw: Any) -> pipec.Costs:
    times = st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.25])
    sizes = st.sampled_from([0, 1, 4, 9])
    stages = {
        f"s{s}": {
            "forward": draw(times),
            "backward_weight": draw(times),
            "output_bytes": draw(sizes),
            "activation_bytes": draw(sizes),
        }
        for s in range(6)
    }
    return pipec.Costs(
        draw(times),
        draw(times),
        draw(times),
        draw(st.none() | times),
        draw(times),
        draw(times),
        draw(st.none() | st.sampled_from([0.5, 3.0])),
        stages,
    )


def fitting(plan: Plan, costs: pipec.Costs) -> pipec.Costs:
    """The costs of the stages that the plan has."""
    from attrs import evolve

    names = {s.name for s in plan.graph.stages}
    return evolve(costs, stages={name: own for name, own in costs.stages.items() if name in names})


@given(plans(), costs_of())
@settings(max_examples=120)
def test_the_clock_agrees_with_a_slow_one(plan: Plan, costs: pipec.Costs) -> None:
    timeline = plan.simulate(fitting(plan, costs))
    start, end = slow_clock(plan, timeline.costs)
    assert timeline.start == pytest.approx(np.asarray(start))
    assert timeline.end == pytest.approx(np.asarray(end))
    assert timeline.makespan == pytest.approx(max(end))


# -- what a timeline says ---------------------------------------------------------------------------------------


@given(plans(), costs_of())
@settings(max_examples=80)
def test_definitions(plan: Plan, costs: pipec.Costs) -> None:
    timeline = plan.simulate(fitting(plan, costs))
    tasks = [plan.table.task(i) for i in range(len(plan))]
    useful, again, working, spans = [], [], [], []
    for device in range(plan.devices):
        own = [i for i, t in enumerate(tasks) if t.device == device and t.kind is not Kind.COPY]
        time = {i: float(timeline.end[i] - timeline.start[i]) for i in own}
        useful.append(sum(time[i] for i in own if tasks[i].kind in (Kind.FORWARD, *BACKWARDS)))
        again.append(sum(time[i] for i in own if tasks[i].kind is Kind.RECOMPUTE))
        working.append(sum(time.values()))
        spans.append(max(timeline.end[i] for i in own) - min(timeline.start[i] for i in own) if own else 0.0)
    assert timeline.useful == pytest.approx(useful)
    assert timeline.recompute == pytest.approx(again)
    assert timeline.span == pytest.approx(max(spans))
    assert timeline.bubble_time == pytest.approx(timeline.makespan - max(useful))
    if timeline.makespan:
        assert timeline.bubble == pytest.approx(1 - sum(useful) / (plan.devices * timeline.makespan))
        assert timeline.busy == pytest.approx([w / timeline.makespan for w in working])
    assert timeline.copies == sum(t.kind is Kind.COPY for t in tasks)
    assert timeline.copy_bytes == sum(
        timeline.costs.stages[plan.graph.stages[t.stage].name].output_bytes or 0
        for t in tasks
        if t.kind is Kind.COPY
    )


@given(plans(), costs_of())
@settings(max_examples=80)
def test_memory_against_counting(plan: Plan, costs: pipec.Costs) -> None:
    """At every instant the level is the sum over the buffers whose [start of writer, end of free) holds it."""
    timeline = plan.simulate(fitting(plan, costs))
    buffers = plan.buffers
    weights = timeline.byte_weights
    assert weights is not None
    for number in range(len(buffers)):
        stage = int(buffers.ref[number])
        if buffers.kind[number] == Buffer.ACTIVATION:
            size = timeline.costs.stages[plan.graph.stages[stage].name].activation_bytes
        else:
            value = plan.graph.values[int(buffers.ref[number])]
            size = timeline.costs.stages[plan.graph.stages[value.producer].name].output_bytes
        assert weights[number] == size
    for device in range(plan.devices):
        own = [i for i in range(len(buffers)) if buffers.device[i] == device]
        times = sorted(
            {
                float(t)
                for i in own
                for t in (timeline.start[buffers.writer[i]], timeline.end[buffers.free[i]])
            }
        )
        levels = {
            t: sum(
                weights[i]
                for i in own
                if timeline.start[buffers.writer[i]] <= t < timeline.end[buffers.free[i]]
            )
            for t in times
        }
        at, level = timeline.memory(device, weights)
        for t, height in zip(at.tolist(), level.tolist(), strict=True):
            assert height == pytest.approx(levels[t])
        assert timeline.peak_bytes is not None
        assert timeline.peak_bytes[device] == pytest.approx(max(levels.values(), default=0))


@given(plans(), costs_of())
@settings(max_examples=80)
def test_critical_path_is_unbroken(plan: Plan, costs: pipec.Costs) -> None:
    """From time zero to the makespan; each task starts when the one before it ended, or its copy arrived."""
    timeline = plan.simulate(fitting(plan, costs))
    path = timeline.critical_path
    assert timeline.start[path[0]] == 0
    assert timeline.end[path[-1]] == timeline.makespan
    for before, after in itertools.pairwise(path):
        gap = timeline.start[after] - timeline.end[before]
        late = timeline.costs.latency if plan.table.kind[before] == Kind.COPY else 0.0
        shared = {0.0, late}
        assert min(abs(gap - g) for g in shared) < 1e-9


def test_intervals_cover_every_lane_without_overlap() -> None:
    plan = pipec.compile(unet(), 2, 3, recompute="always", update="stage")
    timeline = plan.simulate(
        pipec.Costs(latency=0.5, bandwidth=2.0, values={v.name: 3 for v in plan.graph.values})
    )
    seen: dict[tuple[int, Lane], float] = {}
    rows = list(timeline.intervals)
    for row in rows:
        assert row.start >= seen.get((row.device, row.lane), 0.0)
        seen[row.device, row.lane] = row.end
    copies = timeline.copies
    assert len(rows) == len(plan) + copies
    assert sum(row.lane is Lane.OUT for row in rows) == copies


def test_latency_occupies_no_lane_and_bandwidth_does() -> None:
    """Two values from one device to another: with latency both arrive together, with bandwidth in turn."""
    net = pipeline([[-1], [-1], [0, 1]], [2])
    plan = pipec.compile(net, 2, 1, "gpipe", placement=[0, 0, 1], forward_only=True)
    last = len(plan) - 1
    assert str(plan.table.task(last)) == "2F0"
    assert plan.simulate(pipec.Costs(latency=3.0)).start[last] == 2 + 3
    sized = pipec.Costs(bandwidth=2.0, stages={"s0": {"output_bytes": 8}, "s1": {"output_bytes": 6}})
    assert plan.simulate(sized).start[last] == 1 + 4 + 3
    both = pipec.Costs(latency=3.0, bandwidth=2.0, values={"s0": 8, "s1": 6})
    assert plan.simulate(both).start[last] == 1 + 4 + 3 + 3


def test_a_bandwidth_needs_bytes() -> None:
    plan = pipec.compile(pipec.chain(3), 3, 2)
    with pytest.raises(pipec.PlanError) as error:
        plan.simulate(pipec.Costs(bandwidth=1.0, stages={"s0": {"output_bytes": 3}}))
    assert str(error.value) == (
        "costs give a bandwidth but no bytes for s1; set output_bytes of the stages or Costs(values=...), or "
        "profile the modules"
    )
    one = pipec.compile(pipec.chain(3), 1, 2)
    assert one.simulate(pipec.Costs(bandwidth=1.0)).makespan == 18


def test_unknown_sizes_are_none_and_never_zero() -> None:
    plan = pipec.compile(pipec.chain(2), 2, 2)
    timeline = plan.simulate()
    assert timeline.peak_bytes is None
    assert timeline.copy_bytes is None
    assert "unknown" in str(timeline)


def test_an_update_of_all_stages_costs_their_sum() -> None:
    plan = pipec.compile(pipec.chain(3), 1, 1, update="all")
    assert plan.simulate(pipec.Costs(0, 0, 0, update=2, stages={"s1": {"update": 5}})).makespan == 2 + 5 + 2
    split = pipec.compile(pipec.chain(2), 1, 1, lambda p: [[(0, 0, 0), (3, 0, 0), (4, 0, 0)]], update="all")
    assert split.simulate(pipec.Costs(0, 0, 0, update=2)).makespan == 4


def test_recompute_is_work_but_not_useful() -> None:
    timeline = compiled(1, 2, "gpipe", pipec.Costs(1, 1, 1, recompute=2), recompute="always")
    assert (timeline.makespan, timeline.useful, timeline.recompute) == (10, [6.0], [4.0])
    assert timeline.bubble == pytest.approx(0.4)
    assert timeline.busy == [1.0]


def test_a_timeline_prints() -> None:
    sizes = {f"s{s}": {"activation_bytes": 2048, "output_bytes": 512} for s in range(2)}
    timeline = compiled(2, 2, "1f1b", pipec.Costs(stages=sizes, unit="ms"))
    assert str(timeline) == "\n".join(
        [
            "chain: 1f1b, 2 devices, 2 microbatches",
            "makespan 9 ms, span 9 ms, 4 copies of 2 KiB",
            "bubble 33.3% of all devices' time, 3 ms beyond the busiest one's work",
            "device      busy    useful  recompute  activations  peak memory",
            "0          66.7%         6          0            2      4.5 KiB",
            "1          66.7%         6          0            1      3.5 KiB",
        ]
    )
    assert repr(timeline) == "<Timeline of 'chain': makespan 9, bubble 33.3%>"


def test_costs_of_another_kind() -> None:
    with pytest.raises(pipec.SpecError, match=r"simulate: costs must be pipec.Costs\(...\), got int 3"):
        pipec.compile(pipec.chain(2), 2).simulate(3)  # type: ignore[arg-type]


def test_bytes_as_people_write_them() -> None:
    assert [show_bytes(n) for n in (0, 1023, 1024, 1.5 * 2**20, 2**30, 3 * 2**40, 2**52)] == [
        "0 B",
        "1023 B",
        "1 KiB",
        "1.5 MiB",
        "1 GiB",
        "3 TiB",
        "4096 TiB",
    ]
