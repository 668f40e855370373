"""The commands compare and draw."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import CHAIN, SCRIPT, run, script

import pipec
from pipec.schedules import SCHEDULES

__all__ = ["script"]


def test_compare_tells_every_schedule_and_why_one_cannot_serve(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(
        capsys, "compare", "--stages", "8", "--devices", "4", "--microbatches", "8", "--memory-limit", "4activations"
    )
    assert (code, err) == (0, "")
    rows = {line.split()[0]: line for line in out.splitlines()[3:-1]}
    assert list(rows) == list(SCHEDULES)
    timeline = pipec.compile(pipec.chain(8), 4, 8, "1f1b").simulate()
    assert rows["1f1b"].split() == ["1f1b", f"{timeline.makespan:g}", "18", "27.3%", "4", "48"]
    assert rows["gpipe"].startswith("gpipe")
    assert "- memory: device 0 holds 8 activations at its peak; the limit is 4 (and 3 more)" in rows["gpipe"]
    assert rows["looped-bfs"].split(maxsplit=1)[1] == "- as gpipe"  # the same reason is told once


def test_compare_of_some_schedules_with_json_and_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "all.svg"
    code, out, err = run(capsys, "compare", *CHAIN, "--schedule", "gpipe, 1f1b", "--json", "-o", str(picture))
    assert code == 0
    assert [row["name"] for row in json.loads(out)] == ["gpipe", "1f1b"]
    assert err == f"wrote {picture}\n"
    svg = picture.read_text(encoding="utf-8").replace("&#45;", "-")
    assert 'id="p0-task-0F0"' in svg
    assert 'id="p1-task-0F0"' in svg
    assert svg.count("panel-title") == 2


def test_compare_of_saved_plans(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name, schedule in (("one", "gpipe"), ("two", "1f1b")):
        pipec.compile(pipec.chain(2), 2, 4, schedule).save(tmp_path / f"{name}.json")
    code, out, _ = run(capsys, "compare", str(tmp_path / "one.json"), str(tmp_path / "two.json"))
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[3:]] == ["one", "two"]
    assert out.startswith("chain: 2 devices, 4 microbatches\n")
    pipec.compile(pipec.chain(3), 3, 4).save(tmp_path / "three.json")
    out = run(capsys, "compare", str(tmp_path / "one.json"), str(tmp_path / "three.json"))[1]
    assert [line.split()[0] for line in out.splitlines()] == ["schedule", "one", "three"]


def test_compare_where_nothing_serves(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "compare", *CHAIN, "--memory-limit", "0.1a")
    assert code == 1
    assert all(" - memory: " in line or " - as " in line for line in out.splitlines()[1:])
    assert err == "pipec compare: error: no schedule serves this pipeline with these options\n"


def test_draw_writes_pictures(capsys: pytest.CaptureFixture[str], script: Path) -> None:
    assert run(capsys, "draw", "net.py:unet", "--devices", "3")[:2] == (0, "wrote unet.svg\n")
    assert "<svg" in Path("unet.svg").read_text(encoding="utf-8")
    given = (
        "draw",
        "net.py:unet",
        "--devices",
        "3",
        "-o",
        "t.dot",
        "--copies",
        "--lanes",
        "--no-critical",
        "--show-devices",
        "0-1",
        "--show-microbatches",
        "0,2",
        "--memory",
        "no",
        "--width",
        "400",
    )
    assert run(capsys, *given)[0] == 0
    plan = pipec.compile(_unet(), 3, 6)
    expected = pipec.draw(
        plan, copies=True, lanes=True, critical=False, devices=[0, 1], microbatches=[0, 2], memory=False, width=400.0
    )
    assert Path("t.dot").read_text(encoding="utf-8") == expected.dot
    assert run(capsys, "draw", "net.py:unet", "--graph", "stages", "-o", "s.dot")[0] == 0
    assert "cluster" not in Path("s.dot").read_text(encoding="utf-8")
    assert run(capsys, "draw", "net.py:unet", "--graph", "stages", "--devices", "3", "-o", "s.dot")[0] == 0
    assert "cluster_2" in Path("s.dot").read_text(encoding="utf-8")
    assert run(capsys, "draw", "net.py:plan", "--graph", "tasks", "-o", "k.dot")[0] == 0
    assert 'id="task-2B1"' in Path("k.dot").read_text(encoding="utf-8")
    assert run(capsys, "draw", "net.py:plan", "--time", "0:3", "-o", "w.dot")[0] == 0
    assert "window: time 0 to 3" in Path("w.dot").read_text(encoding="utf-8")


def _unet() -> pipec.Pipeline:
    space: dict[str, object] = {"__name__": "net"}
    exec(SCRIPT.replace('print("loading")', ""), space)  # the same script, without the command line
    made = space["unet"]
    assert isinstance(made, pipec.Pipeline)
    return made


@pytest.mark.parametrize("names", [",", "1f1b,,zb-v", "1f1b,"])
def test_compare_wants_a_name_at_every_comma(capsys: pytest.CaptureFixture[str], names: str) -> None:
    code, out, err = run(capsys, "compare", *CHAIN, "--schedule", names)
    assert (code, out) == (2, "")
    assert f"--schedule {names!r} has no name between, before or after its commas" in err
