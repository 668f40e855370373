"""Pictures of tasks that are parts of something: slices of a microbatch, and halves of a group that runs as one."""

from __future__ import annotations

import pytest
from test_render_timeline import Svg, label, tip

import pipec
from pipec.ir import Kind
from pipec.render import draw
from pipec.render.palette import CRITICAL, INK


def test_every_slice_says_so_and_the_legend_and_title_explain_it() -> None:
    plan = pipec.compile(pipec.chain(4), 4, 4, "seq-1f1b", slices=3)
    svg = Svg(draw(plan.simulate(), lanes=True))
    assert svg.text("title") == "chain · seq-1f1b · 4 devices · 4 microbatches · 3 slices"
    found = {label(group) for group in svg.of("task", "forward")}
    assert found == {f"{m}.{k}" for m in range(4) for k in range(3)}
    assert label(svg.by_id("task-0F0")) == "0.0"
    assert "microbatch 0.0" in tip(svg.by_id("task-0F0"))
    assert "3.1: slice 1 of microbatch 3" in [label(group) for group in svg.of("legend")]
    whole = Svg(draw(pipec.compile(pipec.chain(4), 4, 4).simulate()))
    assert {label(group) for group in whole.of("task", "forward")} == set("0123")
    assert not any("slice" in label(group) for group in whole.of("legend"))
    assert "slices" not in whole.text("title")


def test_several_timelines_name_slices_that_all_have() -> None:
    one, two = (pipec.compile(pipec.chain(4), 4, 4, "seq-1f1b", slices=n).simulate() for n in (2, 3))
    assert "slices" not in Svg(draw([one, two], titles=["a", "b"])).text("title")
    assert "2 slices" in Svg(draw([one, one], titles=["a", "b"])).text("title")


def test_a_group_on_the_critical_path_is_outlined_as_a_whole() -> None:
    plan = pipec.compile(pipec.chain(8), 4, 8, "dualpipe-v")
    timeline = plan.simulate()
    svg = Svg(draw(timeline))
    on_path = {int(plan.table.group[i]) for i in timeline.critical_path} - {0}
    everything = set(plan.table.group.tolist()) - {0}
    assert on_path
    assert everything - on_path
    for number in everything:
        group = svg.by_id(f"group-{number}")
        ink = CRITICAL if number in on_path else INK
        strokes = {element.get("stroke", "").lower() for element in group.iter() if element.get("stroke")}
        assert strokes == {ink.lower()}
    for index in timeline.critical_path:
        task = plan.table.task(index)
        if task.kind is Kind.COPY:
            continue
        box = svg.by_id(f"task-{task}")
        strokes = {element.get("stroke", "").lower() for element in box.iter() if element.get("stroke")}
        assert (CRITICAL.lower() in strokes) == (not task.group)
    plain = Svg(draw(timeline, critical=False))
    assert not plain.of("group", "critical")


@pytest.mark.parametrize(("schedule", "devices", "where"), [
    ("gpipe", 3, "on every device"), ("1f1b", 3, "(device 0)"), ("gpipe", 1, "(device 0)"),
])
def test_the_summary_says_which_device_has_the_peak(schedule: str, devices: int, where: str) -> None:
    plan = pipec.compile(pipec.chain(3), devices, 4, schedule)
    assert f"activations {where} " in Svg(draw(plan.simulate())).text("summary") + " "
    sized = pipec.Costs(stages={f"s{n}": {"activation_bytes": 2**20, "output_bytes": 0} for n in range(3)})
    told = Svg(draw(plan.simulate(sized))).text("summary") + " "
    assert f"MiB {where} " in told
