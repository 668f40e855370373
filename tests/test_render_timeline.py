"""The timeline picture: what is in it, where it stands, and what large plans become."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from plans import pipelines

import pipec
from pipec.ir import Kind, Lane
from pipec.render import Picture, draw
from pipec.render.dot import text_width
from pipec.render.timeline import ticks
from pipec.timeline import Timeline

SIZED = {f"s{n}": {"output_bytes": 2**20, "activation_bytes": 2**22} for n in range(8)}


class Svg:
    """An SVG picture read back."""

    def __init__(self, picture: Picture) -> None:
        self.root = ElementTree.fromstring(picture.svg())
        self.groups = [g for g in self.root.iter() if g.tag.endswith("}g") and g.get("class")]

    def of(self, *names: str) -> list[ElementTree.Element]:
        """Groups that carry all these classes."""
        return [g for g in self.groups if set(names) <= set((g.get("class") or "").split())]

    def by_id(self, name: str) -> ElementTree.Element:
        found = [g for g in self.groups if g.get("id") == name]
        assert len(found) == 1, name
        return found[0]

    def text(self, name: str) -> str:
        return " ".join("".join(g.itertext()).strip() for g in self.of(name))

    @property
    def all_text(self) -> str:
        return " ".join(self.root.itertext())


def label(group: ElementTree.Element) -> str:
    return " ".join("".join(t.itertext()) for t in group.iter() if t.tag.endswith("}text"))


def box(group: ElementTree.Element) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of a box."""
    polygon = next(p for p in group.iter() if p.tag.endswith("}polygon"))
    points = [tuple(map(float, pair.split(","))) for pair in (polygon.get("points") or "").split()]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    return min(xs), min(ys), max(xs), max(ys)


def tip(group: ElementTree.Element) -> str:
    return next(v for a in group.iter() for k, v in a.attrib.items() if k.endswith("}title"))


def chain_plan(devices: int = 3, microbatches: int = 4, **options: Any) -> pipec.Plan:
    stages = options.pop("stages", devices)
    return pipec.compile(pipec.chain(stages), devices, microbatches, **options)


def skip_plan() -> pipec.Plan:
    net = pipec.Pipeline("skips")
    first = net.stage("first", None, net.input("x"))
    middle = net.stage("middle", None, first)
    net.loss("loss", None, net.stage("last", None, middle, pipec.skip(first)))
    return pipec.compile(net, 3, 2)


def test_every_task_is_a_box_with_its_id_number_and_place() -> None:
    plan = chain_plan(update="stage", recompute="always")
    timeline = plan.simulate(pipec.Costs(update=1.0))
    svg = Svg(draw(timeline))
    compute = [(d, task) for d in range(plan.devices) for task in plan.compute(d)]
    assert len(svg.of("task")) == len(compute)
    lanes = {d: box(svg.by_id(f"lane-{d}")) for d in range(plan.devices)}
    left, scale = lanes[0][0], (lanes[0][2] - lanes[0][0]) / timeline.makespan
    for device in range(plan.devices):
        for index in plan.lanes[device][Lane.COMPUTE].tolist():
            task = plan.table.task(index)
            group = svg.by_id(f"task-{task}")
            x0, y0, x1, y1 = box(group)
            assert x0 == pytest.approx(left + scale * timeline.start[index], abs=0.1)
            assert x1 == pytest.approx(left + scale * timeline.end[index], abs=0.1)
            assert (y0, y1) == (pytest.approx(lanes[device][1]), pytest.approx(lanes[device][3]))
            assert label(group) == ("" if task.kind is Kind.UPDATE else str(task.microbatch))
            assert f"device-{device}" in (group.get("class") or "").split()


def test_title_lanes_axis_and_legend() -> None:
    timeline = chain_plan().simulate(pipec.Costs(unit="ms"))
    svg = Svg(draw(timeline))
    assert svg.text("title") == "chain · 1f1b · 3 devices · 4 microbatches"
    assert svg.text("summary") == "makespan 18 ms · bubble 33.3% · peak 3 activations (device 0) · 16 copies"
    assert [label(g) for g in svg.of("busy")] == ["67% busy"] * 3
    assert [label(g) for g in svg.of("device")] == ["device 0", "device 1", "device 2"]
    assert [label(g) for g in svg.of("tick") if label(g)] == ["0", "5", "10", "15"]
    assert label(svg.of("axis")[-1]) == "time (ms)"
    assert [label(g) for g in svg.of("legend") if label(g)] == [
        "forward", "backward", "number: microbatch", "critical path", "bubble"
    ]


def test_the_legend_names_kinds_that_are_there() -> None:
    svg = Svg(draw(chain_plan(recompute="always", update="all"), copies=True, lanes=True))
    assert [label(g) for g in svg.of("legend") if label(g)] == [
        "forward",
        "recompute",
        "backward",
        "update",
        "number: microbatch",
        "copy",
        "critical path",
        "bubble",
        "copy",
    ]
    assert Svg(draw(chain_plan(), legend=False)).of("legend") == []


def test_chunks_of_a_device_have_shades() -> None:
    plan = pipec.compile(pipec.chain(4), 2, 2, "interleaved-1f1b")
    svg = Svg(draw(plan))
    fills = {
        name: next(p.get("fill") for p in svg.by_id(name).iter() if p.tag.endswith("}polygon"))
        for name in ("task-0F0", "task-1F0", "task-2F0", "task-0B0")
    }
    assert fills["task-0F0"] == fills["task-1F0"]
    assert len({fills["task-0F0"], fills["task-2F0"], fills["task-0B0"]}) == 3
    assert "chunks 1 to 2" in svg.text("legend")


def test_tooltips_tell_task_stage_time_and_waits() -> None:
    svg = Svg(draw(chain_plan(), costs=pipec.Costs(latency=0.5)))
    rows = tip(svg.by_id("task-1F0")).split("\n")
    assert rows == ["1F0: forward of s1, microbatch 0", "1.5 to 2.5 (1)", "waits for v0[0]:0>1 (ends 1)"]
    assert tip(svg.by_id("lane-0")).startswith("device 0: ")


def test_the_critical_path_is_outlined_and_can_be_left_out() -> None:
    timeline = chain_plan().simulate()
    path = {
        f"task-{timeline.plan.table.task(t)}"
        for t in timeline.critical_path
        if timeline.plan.table.kind[t] != Kind.COPY
    }
    svg = Svg(draw(timeline))
    assert {g.get("id") for g in svg.of("task", "critical")} == path
    assert len(svg.of("critical", "link")) == 4  # down to the last device and back
    assert Svg(draw(timeline, critical=False)).of("critical") == []


def test_copy_arrows_and_dashed_skips() -> None:
    plan = skip_plan()
    svg = Svg(draw(plan, copies=True))
    assert len(svg.of("edge", "copy")) == int((plan.table.kind == Kind.COPY).sum())
    dashed = {
        g.get("id")
        for g in svg.of("edge", "copy")
        if any(p.get("stroke-dasharray") for p in g.iter() if p.tag.endswith("}path"))
    }
    assert dashed == {g.get("id") for g in svg.of("copy", "skip")}
    assert dashed == {"arrow-v0[0]:0>2", "arrow-v0[1]:0>2", "arrow-dv0[0]:2>0", "arrow-dv0[1]:2>0"}
    assert "read by 2F0" in tip(svg.by_id("arrow-v0[0]:0>2"))


def test_copy_lanes_show_both_ends_of_a_copy() -> None:
    plan = skip_plan()
    costs = pipec.Costs(bandwidth=2.0**20, stages={n: {"output_bytes": 2**20} for n in ("first", "middle", "last")})
    svg = Svg(draw(plan.simulate(costs), lanes=True, memory="shares"))
    copies = int((plan.table.kind == Kind.COPY).sum())
    assert len(svg.of("copy", "lane-out")) == len(svg.of("copy", "lane-in")) == copies
    assert len(svg.of("copy-lane", "lane")) == 6
    out, into = box(svg.by_id("copy-v0[0]:0>2-out")), box(svg.by_id("copy-v0[0]:0>2-in"))
    assert (out[0], out[2]) == (into[0], into[2])
    assert out[3] < into[1]


def test_memory_strips_follow_the_timeline() -> None:
    plan = chain_plan(2, 3)
    svg = Svg(draw(plan, memory_limit=pipec.activations(2)))
    assert len(svg.of("memory")) == 2
    assert tip(svg.by_id("memory-0")) == "device 0: peak 2"
    assert tip(svg.by_id("memory-1")) == "device 1: peak 1"
    assert "limit 2" in svg.text("limit")
    assert svg.text("memory-title").startswith("activations held, in shares")
    strip, lane = box(svg.by_id("memory-0-lane")), box(svg.by_id("lane-0"))
    assert (strip[0], strip[2]) == (pytest.approx(lane[0]), pytest.approx(lane[2]))
    highest = min(box(g)[1] for g in svg.of("memory-fill") if strip[1] <= box(g)[1] <= strip[3])
    assert highest == pytest.approx(strip[1] + 2, abs=0.1)  # the peak reaches the limit at the strip's top


def test_memory_in_bytes_where_they_are_known() -> None:
    plan = chain_plan(2, 3)
    costs = pipec.Costs(stages={n: SIZED[n] for n in ("s0", "s1")})
    timeline = plan.simulate(costs)
    assert timeline.peak_bytes is not None
    svg = Svg(draw(timeline, memory_limit=5 * 2**20))
    assert svg.text("memory-title").startswith("memory held")
    assert "limit 5 MiB" in svg.text("limit")
    assert f"peak {timeline.peak_bytes[0] / 2**20:.4g} MiB" in svg.all_text
    assert Svg(draw(timeline, memory="shares")).text("memory-title").startswith("activations held")
    assert Svg(draw(timeline, memory=False)).of("memory") == []


def test_memory_units_that_do_not_fit_are_errors() -> None:
    plan = chain_plan(2, 3)
    with pytest.raises(pipec.RenderError, match="give activation_bytes and output_bytes, or draw memory='shares'"):
        draw(plan, memory="bytes")
    with pytest.raises(pipec.RenderError, match="cannot be drawn over memory in shares"):
        draw(plan, memory_limit=1000)
    with pytest.raises(pipec.RenderError, match="expected True, False, 'shares' or 'bytes'"):
        draw(plan, memory="GiB")


def test_weight_versions_are_shown_where_they_matter() -> None:
    plan = chain_plan(2, 4)
    assert "w0" not in Svg(draw(plan)).all_text
    table = plan.table
    changed = evolve(plan, table=evolve(table, version=np.maximum(table.microbatch - 1, 0)))
    svg = Svg(draw(changed))
    assert label(svg.by_id("task-0F3")) == "3 w2"
    assert "reads weight version 2" in tip(svg.by_id("task-0F3"))


def test_several_timelines_share_one_axis() -> None:
    predicted = chain_plan().simulate(pipec.Costs(unit="s"))
    measured = Timeline(predicted.plan, predicted.costs, predicted.start * 1.5, predicted.end * 1.5, predicted.cause)
    svg = Svg(draw([predicted, measured], titles=["predicted", "measured"]))
    assert [label(g) for g in svg.of("panel-title")] == ["predicted", "measured"]
    first, second = box(svg.by_id("p0-lane-0")), box(svg.by_id("p1-lane-0"))
    assert first[0] == second[0]
    assert (second[2] - second[0]) / (first[2] - first[0]) == pytest.approx(1.5, abs=0.01)
    assert first[3] < second[1]
    assert len(svg.of("makespan")) == 2
    assert len(svg.of("task")) == 2 * len(predicted.plan.table.kind[predicted.plan.table.kind != Kind.COPY])
    assert svg.of("memory") == []
    assert len(Svg(draw([predicted, measured], memory=True)).of("memory")) == 6


def test_ids_are_unique_also_when_stacked() -> None:
    plan = skip_plan()
    svg = Svg(draw([plan, plan], copies=True, lanes=True, memory=True))
    ids = [g.get("id") for g in svg.groups if not re.fullmatch(r"(pipec|n\d+|edge\d+|pipec_\w+)", g.get("id") or "")]
    assert len(ids) == len(set(ids))


def test_text_that_does_not_fit_is_left_out() -> None:
    plan = chain_plan(2, 40)
    for group in Svg(draw(plan, width=200)).of("task"):
        left, _, right, _ = box(group)
        assert not label(group) or right - left > 4
    assert sum(bool(label(g)) for g in Svg(draw(plan, width=200)).of("task")) < 80
    assert all(label(g) for g in Svg(draw(plan, width=3000)).of("task"))


def test_windows_of_devices_microbatches_and_time() -> None:
    plan = chain_plan(4, 6)
    svg = Svg(draw(plan, devices=range(1, 3)))
    assert [label(g) for g in svg.of("device")] == ["device 1", "device 2"]
    svg = Svg(draw(plan, microbatches=[2, 3]))
    assert {label(g) for g in svg.of("task")} == {"2", "3"}
    assert len(svg.of("others")) > 0
    assert "other microbatches" in svg.text("legend")
    assert "microbatches 2-3 of 6" in svg.text("note")
    timeline = plan.simulate()
    svg = Svg(draw(timeline, time=(3, 9)))
    inside = (timeline.start < 9) & (timeline.end > 3) & (plan.table.kind != Kind.COPY)
    assert len(svg.of("task")) == int(inside.sum())
    lane = box(svg.by_id("lane-0"))
    assert all(lane[0] - 0.1 <= box(g)[0] and box(g)[2] <= lane[2] + 0.1 for g in svg.of("task"))
    assert "window: time 3 to 9 of 27" in svg.text("note")


@pytest.mark.parametrize(
    ("window", "message"),
    [
        ({"devices": [7]}, r"devices=\[7\]: expected numbers from 0 to 2"),
        ({"devices": "0"}, "devices='0': expected numbers"),
        ({"microbatches": []}, r"microbatches=\[\]: expected numbers from 0 to 3"),
        ({"time": (5, 2)}, r"time=\(5, 2\): expected two ascending numbers"),
        ({"time": 3}, "time=3: expected two ascending numbers"),
        ({"time": (100, 200)}, "nothing runs in time=.*ends at 18"),
        ({"width": 5}, "width=5: expected points of the time axis"),
    ],
)
def test_windows_that_cannot_be_are_refused(window: dict[str, Any], message: str) -> None:
    with pytest.raises(pipec.RenderError, match=message):
        draw(chain_plan(), **window)


def test_a_large_plan_becomes_a_band_that_says_so() -> None:
    plan = chain_plan(16, 400)
    picture = draw(plan)
    note = re.search(r"only the beginning is drawn: [^\"]*", picture.dot)
    assert note is not None
    assert re.search(r"microbatches 0 to \d+ of 400, [\d,]+ of 12,800 tasks; choose with time=", note[0])
    boxes = picture.dot.count('class="task ')
    assert 5_000 < boxes < 10_000
    assert f"{boxes:,} of 12,800 tasks" in note[0]


def test_eight_thousand_tasks_are_drawn_whole() -> None:
    plan = chain_plan(32, 125)
    picture = draw(plan)
    assert picture.dot.count('class="task ') == 8_000
    assert "only the beginning" not in picture.dot
    assert picture.svg().count('class="node task ') == 8_000


def test_a_window_that_would_be_a_smear_is_refused_with_one_that_is_not() -> None:
    plan = chain_plan(2, 5_000)
    timeline = plan.simulate()
    with pytest.raises(pipec.RenderError, match="which would be a smear; one that can be read: time=") as caught:
        draw(timeline, time=(0, timeline.makespan))
    match = re.search(r"time=\(([\d.]+), ([\d.]+)\)", str(caught.value))
    assert match is not None
    assert draw(timeline, time=(float(match[1]), float(match[2]))).dot.count('class="task ') > 500


def test_too_many_arrows_are_refused_with_something_smaller() -> None:
    plan = chain_plan(16, 120)
    with pytest.raises(pipec.RenderError, match=r"arrows would cover the picture .* microbatches=range\(0, 8\)"):
        draw(plan, copies=True)
    assert draw(plan, copies=True, microbatches=range(8)).dot.count('class="copy') > 100


def test_plans_without_work_or_backward_are_drawn() -> None:
    plan = pipec.compile(pipec.chain(2), 2, 2, forward_only=True)
    svg = Svg(draw(plan, copies=True))
    assert len(svg.of("task")) == 4
    free = pipec.Costs(0, 0, 0)
    assert len(Svg(draw(chain_plan(), costs=free)).of("task")) == 24
    one = Svg(draw(pipec.compile(pipec.chain(1), 1, 1)))
    assert [g.get("id") for g in one.of("task")] == ["task-0F0", "task-0B0"]


@pytest.mark.parametrize(
    ("begin", "end", "room", "expected"),
    [
        (0, 10, 5, [0, 2, 4, 6, 8, 10]),
        (0.2, 0.9, 10, [0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]),
        (95, 210, 3, [100, 150, 200]),
        (0, 0, 5, [0]),
    ],
)
def test_ticks_are_round_numbers(begin: float, end: float, room: float, expected: list[float]) -> None:
    assert ticks(begin, end, room) == pytest.approx(expected)


@given(pipelines())
@settings(max_examples=25)
def test_any_pipeline_can_be_drawn(net: pipec.Pipeline) -> None:
    devices = min(3, len(net.spec.stages))
    plan = pipec.compile(net, devices, 2, "1f1b" if net.spec.losses else "gpipe", recompute="except_last")
    dot = draw(plan, copies=True, lanes=True).dot
    assert dot.count('class="task ') == int((plan.table.kind != Kind.COPY).sum())
    copies = int((plan.table.kind == Kind.COPY).sum())
    assert dot.count('id="arrow-') == len(re.findall(r'id="copy-[^"]*-out"', dot)) == copies
    assert "nan" not in dot
    assert draw(plan, graph="tasks").dot.count('class="task ') == dot.count('class="task ')
    assert draw(plan, graph="stages", pipeline=net).dot.count(' class="stage"') == len(net.spec.stages)


def test_costs_for_a_timeline_are_refused() -> None:
    with pytest.raises(pipec.RenderError, match=r"draw plan\.simulate\(costs\)"):
        draw(chain_plan().simulate(), costs=pipec.Costs())


def test_timelines_in_different_units_are_refused() -> None:
    plan = chain_plan()
    with pytest.raises(pipec.RenderError, match=r"'1f1b' without a unit; '1f1b' in ms; .* take unit='ms'"):
        draw([plan.simulate(), plan.simulate(pipec.Costs(unit="ms"))])


def test_a_title_says_only_what_all_timelines_share() -> None:
    svg = Svg(draw([chain_plan(2, 4), chain_plan(3, 4)]))
    assert svg.text("title") == "chain · 4 microbatches"
    assert Svg(draw([chain_plan(2, 4), chain_plan(2, 4)])).text("title") == "chain · 2 devices · 4 microbatches"


@pytest.mark.parametrize("several", [False, True])
def test_titles_are_not_cut_off(several: bool) -> None:
    net = pipec.Pipeline("W" * 60)
    net.loss("loss", None, net.stage("s", None, net.input("x")))
    plan = pipec.compile(net, 1, 1, recompute="always", update="stage")
    picture = draw([plan, plan], titles=["M" * 60, "b"]) if several else draw(plan)
    assert picture.size is not None
    for name, size in (("title", 15.0), ("panel-title", 11.0)):
        for group in Svg(picture).of(name):
            assert text_width(label(group), size) * 1.1 + 14 < picture.size[0]
