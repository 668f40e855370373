"""The command line on asynchronous schedules: steady steps in tables, weights in figures, plans in files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import pipec
from pipec.cli import main
from pipec.schedules import ALIASES, ASYNCHRONOUS

CHAIN = ("--stages", "4", "--devices", "4", "--microbatches", "4")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    out, err = capsys.readouterr()
    return code, out, err


def compiled(schedule: str, **options: object) -> pipec.Plan:
    return pipec.compile(pipec.chain(4), 4, 4, schedule, update="stage", **options)  # type: ignore[arg-type]


def test_plans_are_written_and_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name in ASYNCHRONOUS:
        path = tmp_path / f"{name}.json"
        assert run(capsys, "plan", *CHAIN, "--schedule", name, "-o", str(path))[0] == 0
        assert pipec.Plan.load(path) == compiled(name)
        assert run(capsys, "simulate", str(path))[1] == f"{compiled(name).simulate()}\n"


def test_figures_of_a_simulation(capsys: pytest.CaptureFixture[str]) -> None:
    costs = pipec.Costs(stages={f"s{n}": {"weight_bytes": 2**20} for n in range(4)}, optimizer=1)
    timeline = compiled("pipemare").simulate(costs)
    given = ("simulate", *CHAIN, "--schedule", "pipemare", "--weight-bytes", "1MiB", "--optimizer", "1")
    assert run(capsys, *given)[:2] == (0, f"{timeline}\n")
    made = json.loads(run(capsys, *given, "--json")[1])
    assert (made["microbatches"], made["minibatches"], made["weights"]) == (4, 5, "corrected decay=0.135")
    assert (made["period"], made["bubble"]) == (12.0, 0.0)
    assert made["per_device"][0]["weight_memory"] == {
        "weights": 2**20, "gradients": 2**20, "optimizer": 2**20, "stash": 0, "rule": 2**20, "total": 2**22}


def test_compare_shows_a_steady_step(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "all.svg"
    names = ["1f1b", "pipedream", "pipemare", *ALIASES]
    code, out, _ = run(capsys, "compare", *CHAIN, "--weight-bytes", "1KiB", "--optimizer", "2", "--schedule",
                       ",".join(names), "-o", str(picture))
    assert code == 0
    lines = out.splitlines()
    assert lines[-2] == "* asynchronous: of a steady step; bubble of the period, devices not joined"
    rows = {line.split()[0]: line.replace(" *", "").split()[1:] for line in lines[3:-2]}
    assert [line.split()[0] for line in lines[3:-2] if " *" in line] == [n for n in names if "1f1b" not in n
                                                                         and n != "pipedream-flush"]
    assert list(rows) == names
    assert out.startswith("chain: 4 devices, 4 microbatches\n")
    assert rows["1f1b"] == rows["pipedream-flush"] == ["21", "9", "42.9%", "4", "4", "KiB", "24"]
    assert rows["pipedream"] == ["13", "0", "0.0%", "4", "5", "KiB", "24"]
    assert rows["pipemare"] == ["12", "0", "0.0%", "7", "5", "KiB", "24"]
    assert rows["paci"] == ["13", "0", "0.0%", "4", "4", "KiB", "24"]
    assert "pipemare" in picture.read_text(encoding="utf-8")
    out = run(capsys, "compare", *CHAIN, "-o", str(picture))[1]
    assert out.endswith(f"wrote {picture} of the synchronous schedules; name others with --schedule\n")
    assert "pipemare" not in picture.read_text(encoding="utf-8")


def test_what_cannot_be_compiled_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "plan", *CHAIN, "--schedule", "pipemare", "--update", "all")
    assert code != 0
    assert "is asynchronous" in err
    assert "(on the command line: --update stage)" in err
    few = ("--stages", "4", "--devices", "4", "--microbatches", "2", "--schedule", "pipedream-2bw,1f1b")
    code, out, _ = run(capsys, "compare", *few)
    assert code == 0
    assert "4 chunks, but microbatches=2" in out
    assert run(capsys, "plan", *CHAIN, "--schedule", "pipemare", "--forward-only")[0] == 0


def test_pictures(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for arguments in ((), ("--graph", "stages"), ("--graph", "tasks")):
        path = tmp_path / f"picture{len(arguments)}.dot"
        code, _, err = run(capsys, "draw", "--stages", "2", "--devices", "2", "--microbatches", "1", "--schedule",
                           "pipemare", "-o", str(path), *arguments)
        assert (code, err) == (0, "")
        assert path.stat().st_size > 100
