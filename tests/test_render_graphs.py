"""Stage and task graphs: every edge once, skips dashed, devices as clusters, limits with a message."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

import pipec
from pipec.ir import Kind
from pipec.render import draw
from pipec.render.tasks import edges, steps

sys.path.insert(0, str(Path(__file__).parents[1] / "viz"))
import make


def unet() -> pipec.Pipeline:
    return make.unet()


def edge_lines(dot: str) -> dict[str, str]:
    return {f"{a} {b}": rest for a, b, rest in re.findall(r"^  (\w+) -> (\w+) ?(.*)$", dot, flags=re.MULTILINE)}


def test_main_edges_are_solid_and_skips_dashed() -> None:
    found = edge_lines(draw(pipec.compile(unet(), 4, 2), graph="stages", pipeline=unet()).dot)
    assert {e for e in found if e.startswith("s") and " s" in e} == {
        "s0 s1",
        "s1 s2",
        "s2 s3",
        "s3 s4",
        "s4 s5",
        "s5 s6",
        "s2 s4",
        "s1 s5",
        "s0 s6",
    }
    assert {e for e, rest in found.items() if "dashed" in rest} == {"s2 s4", "s1 s5", "s0 s6"}
    assert {e for e in found if not re.fullmatch(r"s\d s\d", e)} == {"i0 s0", "i1 l0", "s6 l0", "s6 o0"}


def test_an_unmarked_edge_that_leaves_out_a_stage_is_a_skip() -> None:
    net = pipec.Pipeline("net")
    a = net.stage("a", None, net.input("x"))
    b = net.stage("b", None, a)
    net.loss("loss", None, net.stage("c", None, b, a))
    assert "dashed" in edge_lines(draw(net, graph="stages").dot)["s0 s2"]


def test_without_the_pipeline_losses_and_outputs_are_taken_from_the_plan() -> None:
    net = pipec.Pipeline("net")
    a = net.stage("a", None, net.input("x"))
    net.output(net.stage("side", None, a))
    net.loss("named", None, net.stage("c", None, a))
    plan = pipec.compile(net, 1, 1)
    assert {"s1 o1", "s2 l2", "i0 s0"} <= set(edge_lines(draw(plan, graph="stages").dot))
    assert "named" not in draw(plan, graph="stages").dot
    assert "named" in draw(plan, graph="stages", pipeline=net).dot
    with pytest.raises(pipec.RenderError, match="'chain' has other stages than the plan of 'net'"):
        draw(plan, graph="stages", pipeline=pipec.chain(2))


def test_stages_are_clustered_by_device_and_chunk() -> None:
    dot = draw(pipec.compile(pipec.chain(4), 2, 2, "interleaved-1f1b"), graph="stages").dot
    clusters = re.findall(r"subgraph cluster_\d+ \{\n.*?label=\"([^\"]*)\".*?\n((?:    s\d+.*\n)+)", dot)
    assert [(name, re.findall(r"s\d+(?= \[)", body)) for name, body in clusters] == [
        ("device 0, chunk 0", ["s0"]),
        ("device 1, chunk 0", ["s1"]),
        ("device 0, chunk 1", ["s2"]),
        ("device 1, chunk 1", ["s3"]),
    ]
    assert "cluster" not in draw(pipec.chain(4), graph="stages").dot


def test_edges_carry_parts_and_bytes() -> None:
    net = pipec.Pipeline("net")
    first, second = net.stage("pair", None, net.input("x"), outputs=2)
    net.loss("loss", None, net.stage("end", None, first, second))
    costs = pipec.Costs(values={"pair[0]": 2**21, "pair[1]": 100})
    dot = draw(net, graph="stages", costs=costs).dot
    assert re.findall(r's0 -> s1 \[label="([^"]*)"', dot) == ["[0] 2 MiB", "[1] 100 B"]


def test_the_stage_graph_paints_with_names_of_any_kind() -> None:
    net = pipec.Pipeline('q"<b>')
    value = net.input("F0:s1")
    for name in ("F0:s1", "a\nb", "<i>", "{x|y}"):
        value = net.stage(name, None, value)
    net.loss("loss", None, value)
    root = ElementTree.fromstring(draw(pipec.compile(net, 2, 2), graph="stages", pipeline=net).svg())
    shown = {"".join(t.itertext()) for t in root.iter() if t.tag.endswith("}text")}
    assert {"F0:s1", "a\\nb", "<i>", "{x|y}", "loss"} <= shown


def test_too_many_stages_are_refused() -> None:
    with pytest.raises(pipec.RenderError, match=r"401 stages cannot be read \(at most 400\); draw the timeline"):
        draw(pipec.chain(401), graph="stages")


def test_the_task_graph_holds_every_task_and_need() -> None:
    plan = pipec.compile(pipec.chain(4), 2, 3, recompute="always", update="stage")
    svg = draw(plan, graph="tasks").svg()
    compute = int((plan.table.kind != Kind.COPY).sum())
    assert svg.count('class="node task ') == compute
    named = {(str(plan.table.task(a)), str(plan.table.task(b))) for a, b in edges(plan)}
    assert ("1F0", "0F0") in named
    assert ("0B2", "0R2") in named
    assert ("2B1", "3B1") in named
    drawn = [e for e in named if f'id="needs-{e[1]}-{e[0]}"' in svg.replace("&#45;", "-")]
    assert len(drawn) == len(named) == svg.count('class="edge needs')
    crossing = {(a, b) for a, b in edges(plan) if plan.table.device[a] != plan.table.device[b]}
    assert svg.count('class="edge needs copy"') == len(crossing) == 6


def test_columns_of_the_task_graph_follow_every_need() -> None:
    plan = pipec.compile(unet(), 3, 4, "1f1b")
    needs = edges(plan)
    ids = plan.table.kind != Kind.COPY
    column = steps(plan, ids.nonzero()[0].astype("int32"), needs)
    assert all(column[need] < column[task] for task, need in needs)
    for device in range(plan.devices):
        own = [column[t] for t in plan.lanes[device][0].tolist()]
        assert own == sorted(set(own))


def test_too_many_tasks_are_refused_with_something_smaller() -> None:
    plan = pipec.compile(pipec.chain(8), 8, 50)
    with pytest.raises(
        pipec.RenderError, match=r"800 tasks cannot be read \(at most 600\); .*microbatches=37"
    ) as caught:
        draw(plan, graph="tasks")
    assert "draw the timeline" in str(caught.value)
    assert draw(pipec.compile(pipec.chain(8), 8, 37), graph="tasks").dot.count('class="task ') == 592


def test_graphs_refuse_what_they_cannot_draw() -> None:
    with pytest.raises(pipec.RenderError, match="a task graph is drawn of a Plan, got Pipeline"):
        draw(pipec.chain(2), graph="tasks")
    with pytest.raises(pipec.RenderError, match="a stage graph is drawn of a Pipeline or a Plan, got int"):
        draw(3, graph="stages")
    with pytest.raises(pipec.RenderError, match="a stage graph has no option copies"):
        draw(pipec.chain(2), graph="stages", copies=True)


def test_the_gallery_is_fresh() -> None:
    """Fails when a picture in viz/ no longer shows what pipec draws: run ``python viz/make.py``."""
    made = make.entries()
    stale = make.stale(made, {entry.name: entry.make() for entry in made})
    assert stale == [], "run: python viz/make.py"


def test_the_gallery_shows_every_schedule() -> None:
    from pipec.schedules import REGISTRY

    index = (make.HERE / "README.md").read_text(encoding="utf-8")
    assert [name for name in REGISTRY if f"(schedule-{name}.svg)" not in index] == []


def test_a_changed_picture_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = make.Entry("one", "One", "Text.", "now.", lambda: draw(pipec.chain(2), graph="stages"))
    monkeypatch.setattr(make, "HERE", tmp_path)
    monkeypatch.setattr(make, "FRESH", tmp_path / "fresh.json")
    monkeypatch.setattr(make, "entries", lambda: [entry])
    assert make.main([]) == 0
    picture = entry.make()
    assert make.stale([entry], {"one": picture}) == []
    assert make.stale([entry], {"one": draw(pipec.chain(3), graph="stages")}) == ["one.svg"]
    (tmp_path / "one.svg").write_text("<svg/>", encoding="utf-8")
    assert make.stale([entry], {"one": picture}) == ["one.svg"]
    (tmp_path / "old.svg").write_text("<svg/>", encoding="utf-8")
    assert make.main(["--check"]) == 1
    assert make.main([]) == 0
    assert not (tmp_path / "old.svg").exists()
    assert make.main(["--check"]) == 0
