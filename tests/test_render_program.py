"""The Graphviz program: found, missing, failing, hanging; and what is left behind each time."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import pipec
from pipec.render import Picture, draw, program


@pytest.fixture
def plan() -> pipec.Plan:
    return pipec.compile(pipec.chain(2), 2, 2)


def stand_in(folder: Path, script: str, name: str = "dot") -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with nothing but an empty folder, and no scripts beside this Python."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(program, "_script_folders", lambda: iter(()))
    return folder


def test_dot_text_needs_no_program(plan: pipec.Plan, alone: Path, tmp_path: Path) -> None:
    plan.draw(tmp_path / "p.dot")
    assert (tmp_path / "p.dot").read_text(encoding="utf-8") == plan.draw().dot
    assert plan.draw().dot.startswith("// paint with: neato -n2")


def test_missing_program_is_one_error_with_install_lines(plan: pipec.Plan, alone: Path, tmp_path: Path) -> None:
    with pytest.raises(pipec.RenderError) as caught:
        plan.draw(tmp_path / "p.svg")
    message = str(caught.value)
    for part in (
        "neither `dot` nor `graphviz-pure` was found",
        "pip install graphviz-pure",
        "apt install graphviz",
        "dnf install graphviz",
        "brew install graphviz",
        "winget install graphviz",
        f"the DOT source was written to {tmp_path / 'p.svg.dot'}",
    ):
        assert part in message
    assert (tmp_path / "p.svg.dot").read_text(encoding="utf-8") == plan.draw().dot
    assert not (tmp_path / "p.svg").exists()
    assert caught.value.__cause__ is None


def test_failing_program_reports_what_it_said(plan: pipec.Plan, alone: Path, tmp_path: Path) -> None:
    stand_in(alone, "echo 'libfoo.so: cannot open' >&2; exit 1")
    with pytest.raises(pipec.RenderError, match=r"exit status 1:\n  libfoo\.so: cannot open") as caught:
        plan.draw(tmp_path / "p.svg")
    assert str(alone / "dot") in str(caught.value)
    assert not (tmp_path / "p.svg").exists()


def test_silent_and_wrong_output_is_an_error(plan: pipec.Plan, alone: Path, tmp_path: Path) -> None:
    stand_in(alone, "exit 0")
    with pytest.raises(pipec.RenderError, match="wrote no SVG:\n  it said nothing"):
        plan.draw(tmp_path / "p.svg")
    stand_in(alone, "echo hello")
    with pytest.raises(pipec.RenderError, match="something that is no SVG"):
        plan.draw(tmp_path / "p.svg")
    assert not (tmp_path / "p.svg").exists()


def test_hanging_program_is_stopped(plan: pipec.Plan, alone: Path, tmp_path: Path) -> None:
    stand_in(alone, f"exec {sys.executable} -c 'import time; time.sleep(100)'")
    with pytest.raises(pipec.RenderError, match=r"did not finish the SVG in 0.3 s; draw less \(devices=") as caught:
        plan.draw(tmp_path / "p.svg", timeout=0.3)
    assert "the DOT source was written to" in str(caught.value)


def test_dot_on_the_path_comes_first(plan: pipec.Plan, alone: Path) -> None:
    stand_in(alone, "exit 0", "graphviz-pure")
    assert program.find_program() == str(alone / "graphviz-pure")
    stand_in(alone, "exit 0")
    assert program.find_program() == str(alone / "dot")


def test_the_program_from_pip_is_found_without_an_activated_environment(
    plan: pipec.Plan, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = program.find_program()
    assert found is not None
    assert Path(found).stem == "graphviz-pure"
    assert "<svg" in plan.draw().svg()


def test_importing_pipec_needs_no_program() -> None:
    code = "import sys, pipec; print(any('graphviz' in name for name in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    assert done.stdout.strip() == "False"


def test_formats_and_paths(plan: pipec.Plan, tmp_path: Path) -> None:
    assert plan.draw(tmp_path / "none").path == tmp_path / "none.svg"
    assert plan.draw(tmp_path / "p.PNG").path == tmp_path / "p.PNG"
    assert (tmp_path / "p.PNG").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(pipec.RenderError, match=r"one of \.svg, \.png, \.pdf, \.dot, \.gv"):
        plan.draw(tmp_path / "p.jpg")
    with pytest.raises(pipec.RenderError, match="there is no folder"):
        plan.draw(tmp_path / "no" / "p.svg")
    (tmp_path / "folder.dot").mkdir()
    with pytest.raises(pipec.RenderError, match="is a folder; name a file in it"):
        plan.draw(tmp_path / "folder.dot")


def test_a_png_too_large_to_read_is_refused() -> None:
    with pytest.raises(pipec.RenderError, match=r"write .svg, or draw less"):
        Picture("digraph {}", True, (40_000.0, 100.0)).png()


def test_pictures_show_in_notebooks(plan: pipec.Plan, alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without = plan.draw()._repr_mimebundle_()
    assert set(without) == {"text/plain"}
    assert "pip install graphviz-pure" in without["text/plain"]
    monkeypatch.undo()
    shown = plan.draw()._repr_mimebundle_()
    assert shown["image/svg+xml"].startswith("<svg")
    assert plan.draw()._repr_svg_() == shown["image/svg+xml"]


def test_unknown_options_and_objects_are_refused(plan: pipec.Plan) -> None:
    with pytest.raises(pipec.RenderError, match="no option colour; known are copies, critical"):
        draw(plan, colour=1)
    with pytest.raises(pipec.RenderError, match="expected one of timeline, stages, tasks"):
        draw(plan, graph="pie")
    with pytest.raises(pipec.RenderError, match="draw takes a Plan or a Timeline, got Pipeline"):
        draw(pipec.chain(2))
    with pytest.raises(pipec.RenderError, match="the list is empty"):
        draw([])
    with pytest.raises(pipec.RenderError, match="2 timelines but 1 titles"):
        draw([plan, plan], titles=["one"])
