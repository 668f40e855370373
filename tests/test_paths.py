"""Paths of files that nobody can read or write are answered in pipec's words, before anything is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pipec
from pipec.files import to_dict

PLAN = pipec.compile(pipec.chain(2), 2, 2)
WAYS: dict[str, Callable[[Any], Any]] = {
    "draw": PLAN.draw,
    "timeline": lambda path: PLAN.simulate().draw(path),
    "trace": lambda path: PLAN.simulate().to_chrome_trace(path),
    "save": PLAN.save,
    "load": pipec.Plan.load,
    "csv": PLAN.to_torch_csv,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("path", "message"), [
    ("", "'' is no path of a file"),
    ("  ", "'  ' is no path of a file"),
    ("a\0b.svg", r"'a\x00b.svg' is no path of a file"),
    (".", "'.' is a folder; name a file in it"),
    ("..", "'..' is a folder; name a file in it"),
    ("/", "'/' is a folder; name a file in it"),
    ("new/", "'new/' is a folder; name a file in it"),
    (3, "expected the path of a file, got int 3"),
    (["a.svg"], "expected the path of a file, got list ['a.svg']"),
    (b"a.svg", "expected the path of a file as text, got b'a.svg'"),
])
def test_what_is_no_path_of_a_file(
    way: str, path: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(pipec.PipecError) as error:
        WAYS[way](path)
    assert str(error.value) == message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("way", [name for name in WAYS if name != "load"])
def test_a_file_that_cannot_be_written(way: str, tmp_path: Path) -> None:
    """A folder that is not there, and one that is no folder."""
    (tmp_path / "file").touch()
    for folder in ("absent", "file"):
        with pytest.raises(pipec.PipecError, match=f"cannot (write|draw) .*{folder}"):
            WAYS[way](tmp_path / folder / "out.svg")


def test_a_plan_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(pipec.PlanError, match=r"cannot read .*plan\.json: No such file"):
        pipec.Plan.load(tmp_path / "plan.json")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(pipec.PlanError, match="bytes is no text"):
        pipec.Plan.load(tmp_path / "bytes")
    (tmp_path / "deep.json").write_text("[" * 200_000)
    with pytest.raises(pipec.PlanError, match=r"deep\.json is no JSON"):
        pipec.Plan.load(tmp_path / "deep.json")
    (tmp_path / "digits.json").write_text(json.dumps(to_dict(PLAN)).replace('"devices": 2', f'"devices": {"9" * 5000}'))
    with pytest.raises(pipec.PlanError):
        pipec.Plan.load(tmp_path / "digits.json")


@pytest.mark.parametrize("given", [None, 3, b"plan", ["plan"], Path("plan.txt")])
def test_what_is_no_text(given: Any) -> None:
    with pytest.raises(pipec.PlanError, match="expected the text of a plan, got"):
        pipec.Plan.parse(given)
    with pytest.raises(pipec.ScheduleError, match="schedule 'text': expected text, got"):
        pipec.parse_schedule(given)
