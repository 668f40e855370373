"""Pictures and figures of asynchronous plans: steps, versions, the steady period, memory for weights."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import numpy as np
import pytest
from test_render_timeline import Svg, box, label, tip

import pipec
from pipec import PipeDream, PipeMare
from pipec.footprint import weight_memory
from pipec.ir import Kind, Lane, Plan
from pipec.periods import periods
from pipec.render import draw
from pipec.render.picture import DPI
from pipec.steady import measured_period
from pipec.timeline import Timeline


def chain(devices: int, microbatches: int, schedule: object, stages: int = 0, **options: object) -> Plan:
    return pipec.compile(
        pipec.chain(stages or devices), devices, microbatches, schedule, update="stage", **options  # type: ignore
    )


def start_of(line: ElementTree.Element) -> float:
    """Where a line begins, in points from the left."""
    path = next(p for p in line.iter() if p.tag.endswith("}path"))
    return float(re.findall(r"-?[\d.]+", path.get("d") or "")[0])


def test_steps_and_versions_are_drawn() -> None:
    plan = chain(3, 2, "pipedream")
    svg = Svg(draw(plan))
    names = ["prologue, steps of minibatches 0 to 1", "step of minibatch 2 (steady)", "step of minibatch 3",
             "step of minibatch 4", "epilogue, the flush"]
    assert [label(g) for g in svg.of("step") if label(g) and "end of" not in label(g)] == names
    ends = [svg.by_id(f"step-{k}") for k in (1, 2, 3, 4)]
    assert [tip(g) for g in ends] == [f"end of the step of minibatch {k}" for k in (1, 2, 3, 4)]
    left = [start_of(g) for g in ends]
    assert np.allclose(np.diff(left), np.diff(left)[0], atol=0.1)
    assert left[0] == pytest.approx(box(svg.by_id("task-0F4"))[0], abs=1.5)
    assert label(svg.by_id("task-0F4")) == "4 w1"
    assert "reads weight version 1" in tip(svg.by_id("task-0F4"))
    assert "replaces weight version 1 by 2" in tip(svg.by_id("task-0U1"))
    assert "weights stash" in svg.all_text
    assert "period 6" in svg.all_text
    window = Svg(draw(plan, time=(0, 14)))
    assert [g.get("id") for g in window.groups if re.fullmatch(r"step-\d", g.get("id") or "")] == ["step-1"]
    assert "end of a step" not in Svg(draw(pipec.compile(pipec.chain(3), 3, 2))).all_text


@pytest.mark.parametrize("schedule", ["pipemare", "pipedream"])
def test_forwards_show_their_microbatch_and_version(schedule: str) -> None:
    plan = chain(4, 4, schedule)
    svg = Svg(draw(plan))
    assert "number: microbatch" in svg.text("legend")
    end = plan.simulate().end
    drawn = [plan.table.task(row) for own in plan.lanes for row in own[Lane.COMPUTE].tolist() if end[row] < 40]
    late = [task for task in drawn if task.kind is pipec.Kind.FORWARD and task.microbatch > 9]
    assert late
    assert [label(svg.by_id(f"task-{task}")) for task in late] == [f"{t.microbatch} w{t.version}" for t in late]


@pytest.mark.parametrize(("devices", "microbatches", "schedule"), [
    (4, 4, "pipedream"), (8, 4, "pipemare"), (8, 1, "pipedream"), (8, 1, "pipemare"), (2, 8, "pipemare"),
])
def test_a_picture_shows_two_steady_steps_at_the_size_of_a_screen(
    devices: int, microbatches: int, schedule: str
) -> None:
    plan = chain(devices, microbatches, schedule)
    timeline, found = plan.simulate(), periods(plan)
    picture = draw(timeline)
    assert picture.size is not None
    assert 600 <= picture.size[0] * DPI / 72 <= 2200
    shown = {tip(g).split(":")[0] for g in Svg(picture).of("task")}
    rows = np.flatnonzero((found.step >= found.steady) & (found.step < found.steady + 2)
                          & (plan.table.kind != Kind.COPY))
    assert {str(plan.table.task(row)) for row in rows.tolist()} <= shown
    everything = [f"task-{task}" for d in range(devices) for task in plan.compute(d)]
    for whole in (draw(timeline, time=(0, timeline.makespan)), draw(timeline, width=2000)):
        assert sorted(g.get("id") or "" for g in Svg(whole).of("task")) == sorted(everything)
        assert "steady steps and" not in Svg(whole).all_text
    note = rf"steady steps and what leads to them: time [\d.]+ to [\d.]+ of {timeline.makespan:g}; all of it with time="
    assert re.search(note, Svg(picture).all_text)


def test_a_long_period_is_drawn_alone() -> None:
    plan = chain(4, 32, "pipedream")
    picture = draw(plan)
    assert picture.size is not None
    assert picture.size[0] * DPI / 72 <= 2200
    shown = {tip(g).split(":")[0] for g in Svg(picture).of("task")}
    found = periods(plan)
    first, second = ({str(plan.table.task(row)) for row in found.ids(step).tolist()
                      if plan.table.kind[row] != Kind.COPY} for step in (found.steady, found.steady + 1))
    assert first <= shown
    assert not second <= shown


def test_in_a_long_period_a_narrow_forward_shows_its_version_where_it_changes() -> None:
    plan = chain(4, 32, "pipedream")
    svg = Svg(draw(plan))
    assert [label(svg.by_id(f"task-0F{m}")) for m in (33, 34, 35, 36, 63)] == ["33", "34", "35 w1", "36", "63"]
    assert "reads weight version 1" in tip(svg.by_id("task-0F36"))
    assert [label(svg.by_id(f"task-0B{m}")) for m in (34, 35, 36)] == ["34 w0", "35 w1", "36 w1"]
    assert label(svg.by_id("task-2F32")) == "32 w0"  # the first one shown


def test_a_long_period_beside_others_is_drawn_until_it_goes_on_alike() -> None:
    plans = [chain(4, 32, schedule) for schedule in ("1f1b", "pipedream", "pipemare")]
    picture = draw(plans)
    assert picture.size is not None
    assert picture.size[0] * DPI / 72 <= 2500
    svg = Svg(picture)
    told = "what leads to the steady steps and how they begin: they go on alike, each in 96: time 0 to 114 of 393;"
    assert svg.all_text.count(told) == 1
    for panel in (1, 2):
        assert svg.by_id(f"p{panel}-step-0") is not None
        assert svg.by_id(f"p{panel}-task-0U0") is not None  # what the first steady step updates
    assert len(svg.of("makespan")) == 1  # all of 1f1b is there


def test_plans_side_by_side_share_a_time() -> None:
    plans = [chain(4, 4, schedule) for schedule in ("1f1b", "pipedream", "pipemare")]
    picture = draw(plans)
    assert picture.size is not None
    assert picture.size[0] * DPI / 72 <= 2200
    svg = Svg(picture)
    assert svg.all_text.count("steady steps and what leads to them: time 0 to 49 of 69") == 1
    lanes = [box(svg.by_id(f"p{panel}-lane-0")) for panel in range(3)]
    assert lanes[1][2] == lanes[2][2] > lanes[0][2]
    assert len(svg.of("makespan")) == 1  # that of 1f1b; the others go on
    for panel in range(1, 3):
        right = max(box(g)[2] for g in svg.of("task", "forward") if (g.get("id") or "").startswith(f"p{panel}-"))
        assert right <= lanes[panel][2] + 0.1


def test_updates_without_duration_are_ticks_between_boxes() -> None:
    plan = chain(3, 2, "pipedream")
    svg = Svg(draw(plan))
    order = [g.get("id") or "" for g in svg.of("task")]
    for device in range(3):
        lane = box(svg.by_id(f"lane-{device}"))
        for task in plan.compute(device):
            if task.kind is not Kind.UPDATE:
                continue
            left, top, right, bottom = box(svg.by_id(f"task-{task}"))
            assert right - left == pytest.approx(3.0, abs=0.05)
            assert top < lane[1] - 3
            assert bottom > lane[3] + 3
            before = box(svg.by_id(f"task-{device}B{2 * task.microbatch + 1}"))
            assert (left + right) / 2 == pytest.approx(before[2], abs=0.1)
            assert order.index(f"task-{task}") > max(k for k, name in enumerate(order) if "U" not in name)
            assert f"replaces weight version {task.version} by {task.version + 1}" in tip(svg.by_id(f"task-{task}"))
    assert "update" in svg.text("legend")
    timed = Svg(draw(plan, costs=pipec.Costs(update=1.0)))
    lane, tall = box(timed.by_id("lane-0")), box(timed.by_id("task-0U0"))
    assert (tall[1], tall[3]) == pytest.approx((lane[1], lane[3]), abs=0.1)
    assert tall[2] - tall[0] > 5


@pytest.mark.parametrize("schedule", ["pipedream", "pipemare", "predicted", "live-weights", "nesterov"])
@pytest.mark.parametrize(("devices", "minibatch"), [(1, 1), (2, 1), (4, 3), (5, 8)])
def test_no_bubble_in_the_period_of_balanced_stages(schedule: str, devices: int, minibatch: int) -> None:
    timeline = chain(devices, minibatch, schedule).simulate()
    assert (timeline.period, timeline.bubble, timeline.bubble_time) == (3.0 * minibatch, 0.0, 0.0)
    gpipe = pipec.compile(pipec.chain(devices), devices, minibatch, "gpipe").simulate()
    assert 1 - gpipe.bubble == pytest.approx(minibatch / (minibatch + devices - 1))
    assert gpipe.period == gpipe.makespan


def test_the_period_is_the_slowest_devices_work() -> None:
    costs = pipec.Costs(stages={"s2": {"forward": 3.0}, "s4": {"backward_weight": 2.5}}, update=0.25)
    for schedule in ("pipedream", "pipemare", "pipedream-2bw"):
        for stages, devices in ((5, 5), (8, 4), (6, 2)):
            plan = chain(devices, 5, schedule, stages, costs=costs)
            timeline = plan.simulate()
            work = [sum(5 * (costs.duration(pipec.Kind.FORWARD, f"s{s}") + costs.duration(pipec.Kind.BACKWARD, f"s{s}"))
                        + 0.25 for s in range(stages) if plan.stage_device(s) == d) for d in range(devices)]
            assert timeline.period == pytest.approx(max(work))
            assert timeline.bubble == pytest.approx(1 - sum(timeline.period_useful) / (devices * max(work)))


def test_more_in_flight_hides_hand_overs() -> None:
    costs = pipec.Costs(latency=1.0)
    few, many = (chain(4, 4, PipeMare(inflight), costs=costs).simulate() for inflight in ("1f1b", "full"))
    assert few.bubble > 0.1
    assert many.bubble == pytest.approx(0.0)


@pytest.mark.parametrize("schedule", ["pipedream", PipeMare(segments=2)])
def test_the_period_is_what_a_longer_run_takes_per_step(schedule: object, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = pipec.Costs(stages={"s1": {"forward": 2.0}, "s3": {"backward_input": 2.5}}, latency=0.7)
    period = chain(4, 2, schedule, costs=costs).simulate().period
    monkeypatch.setattr("pipec.passes.settle.STEADY", 40)
    longer = chain(4, 2, schedule, costs=costs)
    found, end = periods(longer), longer.simulate().end
    assert longer.minibatches - found.steady == 40
    first, last = (max(end[found.ids(step)]) for step in (longer.minibatches - 13, longer.minibatches - 1))
    assert (last - first) / 12 == pytest.approx(period)


def test_a_measured_timeline_takes_the_mean_of_its_steady_steps() -> None:
    plan = chain(3, 2, "pipemare")
    predicted = plan.simulate()
    measured = Timeline(plan, predicted.costs, predicted.start * 2, predicted.end * 2, predicted.cause, measured=True)
    assert measured.period == measured_period(plan, predicted.end * 2) == pytest.approx(2 * predicted.period)


@pytest.mark.parametrize(("optimizer", "wanted"), [(1, 4 / 3), (2, 5 / 4)])
def test_memory_for_weights_and_optimizer(optimizer: int, wanted: float) -> None:
    costs = pipec.Costs(stages={f"s{i}": {"weight_bytes": 1200} for i in range(6)}, optimizer=optimizer)

    def total(schedule: object) -> int:
        return sum(own.total for own in weight_memory(chain(6, 6, schedule), costs) or [])

    base = total("1f1b")
    assert base == 6 * 1200 * (2 + optimizer)
    assert total("pipemare") == pytest.approx(wanted * base)
    assert total(PipeMare(correction=None)) == total("live-weights") == base
    assert total("pipedream-2bw") == base + 6 * 1200
    assert total(PipeDream(vertical_sync=True)) == base + 6 * 1200
    one = weight_memory(chain(6, 1, "pipedream"), costs)
    assert one is not None
    assert [own.stash for own in one] == [1200 * (5 - device) for device in range(6)]
    assert weight_memory(chain(6, 1, "pipedream"), pipec.Costs()) is None


def test_stashed_weights_count_as_live_bytes() -> None:
    sizes = {"activation_bytes": 0, "output_bytes": 0}
    plan = chain(4, 1, "pipedream")
    known = pipec.Costs(stages={f"s{i}": {**sizes, "weight_bytes": 100} for i in range(4)})
    assert plan.simulate(known).peak_bytes == [300, 200, 100, 0]
    assert plan.simulate(pipec.Costs(stages={f"s{i}": sizes for i in range(4)})).peak_bytes is None
    text = str(plan.simulate(known))
    assert "weights and optimizer at most 700 B a device: weights 100 B, gradients 100 B, optimizer 200 B" in text
    assert "period 3 a minibatch, step 4, bubble 0.0%" in text
    assert f"laid out over {plan.minibatches} minibatches" in text
    with pytest.raises(pipec.ScheduleError, match="bytes are unknown for the weights of stage 's0'"):
        chain(4, 1, "pipedream", costs=pipec.Costs(stages={f"s{i}": sizes for i in range(4)}), memory_limit=1000)
    with pytest.raises(pipec.PlanError, match="device 0 holds 300 B at its peak; the limit is 250 B"):
        chain(4, 1, "pipedream", costs=known, memory_limit=250)


def test_skips_several_stages_and_several_chunks_a_device() -> None:
    net = pipec.Pipeline("net")
    first = net.stage("a", None, net.input("x"))
    middle = net.stage("b", None, first)
    last = net.stage("c", None, middle, pipec.skip(first))
    net.loss("loss", None, net.stage("d", None, last, pipec.skip(middle)), net.input("y"))
    for placement, devices in (("linear", 2), ("v", 2), ("looped", 2), ([0, 1, 0, 1], 2), ("linear", 4)):
        for schedule in ("pipedream", "pipemare", PipeMare(segments=2)):
            plan = pipec.compile(net, devices, 2, schedule, placement=placement, update="stage")
            found = periods(plan)
            assert found.steady == plan.minibatches - 3
            assert plan.simulate().period == pytest.approx(2 * (4 if plan.recompute != "never" else 3) * 4 / devices)
