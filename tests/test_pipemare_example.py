"""The reproduction of PipeMare in its quick form, and what its report is made with."""

from __future__ import annotations

import importlib
import json
import sys
import xml.etree.ElementTree
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import pipec

FOLDER = Path(__file__).resolve().parent.parent / "examples" / "pipemare"
OWN = [path.stem for path in FOLDER.glob("*.py")]

Load = Any


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Load]:
    """Modules of the example as its script sees them, in a folder of its own; gone from sys.modules afterwards."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.chdir(tmp_path)
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    before = {name: sys.modules.pop(name) for name in OWN if name in sys.modules}

    def one(name: str) -> ModuleType:
        return importlib.import_module(name)

    yield one
    for name in OWN:
        sys.modules.pop(name, None)
    sys.modules.update(before)
    torch.set_num_threads(threads)
    torch.set_rng_state(state)


def test_quick_report_is_whole_and_goes_on(load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = load("report")
    folder = tmp_path / report.main(["--quick"])["folder"]
    text = (folder / "README.md").read_text("utf-8")
    for part in ("memory", "speed", "digits", "digits best", "letters", "letters best"):
        assert f"<!-- {part}: begin -->" in text
    assert "| - |" not in text  # no cell without a figure
    assert text.count("9 of 9 runs") == 2
    xml.etree.ElementTree.fromstring((folder / "digits.svg").read_text("utf-8"))
    rows = json.loads((folder / "results.json").read_text("utf-8"))
    assert rows["speed"]["rows"]["ResNet"]["finite"]

    key = next(name for name in rows if name.startswith("letters") and "pipedream" in name)
    kept = rows.pop(key)
    (folder / "results.json").write_text(json.dumps(rows), "utf-8")
    capsys.readouterr()
    again = report.main(["--quick", "--only", "letters"])["rows"]
    assert capsys.readouterr().out.count("1/1") == 1  # only the run that was missing
    assert again[key]["accuracy"] == kept["accuracy"]
    assert again[key]["loss"] == kept["loss"]


def test_figures_of_a_small_pipeline_are_those_of_the_formulas(load: Load) -> None:
    row = load("memory").row
    p, n = 6, 4
    gpipe = row(p, n, "gpipe", 1)
    assert gpipe["utilisation"] == pytest.approx(n / (n + p - 1))
    assert (gpipe["memory"], gpipe["versions"]) == (1.0, 1)
    mare = row(p, n, pipec.PipeMare(), 1)
    assert mare["utilisation"] == pytest.approx(1.0)
    assert mare["memory"] == pytest.approx(4 / 3)
    assert row(p, n, pipec.PipeMare(), 2)["memory"] == pytest.approx(5 / 4)
    assert (mare["versions"], mare["activations"]) == (1, p * p)
    dream = row(p, 1, pipec.PipeDream(), 1)
    assert dream["versions"] == p
    assert dream["memory"] == pytest.approx((3 * p + p * (p - 1) / 2) / (3 * p))
    two = row(p, p, pipec.PipeDream2BW(), 1)
    assert (two["versions"], two["memory"]) == (2, pytest.approx(4 / 3))


def test_fine_networks_have_the_papers_numbers_of_stages(load: Load) -> None:
    fine = load("fine_nets")
    assert len(fine.resnet50()) == 107
    assert len(fine.transformer()) == 93
    assert len(load("nets").digits_resnet()) == 19


def test_the_107_stage_network_runs_asynchronously(load: Load) -> None:
    fine, nets, training = load("fine_nets"), load("nets"), load("training")
    net = nets.pipeline("ResNet", fine.resnet50(2), ("image",), "target", training.score_loss)
    plan = pipec.compile(net, 107, 4, schedule="pipemare", update="stage")
    with pipec.Runner(net, plan, ["cpu"] * 107, lambda own: torch.optim.SGD(own, 1e-3), backend="replay") as run:
        for _ in range(2):
            run.step(torch.randn(8, 3, 8, 8), torch.randint(10, (8,)))
        finished = run.flush().finished
    assert finished == tuple((minibatch, m) for minibatch in range(2) for m in range(4))


def test_learning_rate_rises_then_falls_to_nothing(load: Load) -> None:
    rate = load("training").rate
    made = [rate(update, 100, 10) for update in range(100)]
    assert made[9] == made[10] == 1.0
    assert made[:10] == sorted(made[:10])
    assert made[10:] == sorted(made[10:], reverse=True)
    assert made[-1] < 0.001


def test_a_run_that_explodes_says_so(load: Load) -> None:
    training, methods = load("training"), load("methods")
    row = training.train(training.SMALL["digits"], methods.Method(), 1e6, 0, 2)
    assert row["diverged"] < 16
    assert row["accuracy"] == 0.0
    assert load("report").told([row, {"accuracy": 0.5}]) == "diverged 50.0"


def test_chart_has_round_ticks_and_cuts_at_its_top(load: Load, tmp_path: Path) -> None:
    chart = load("chart")
    assert chart.ticks(0.0, 1.0) == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert chart.ticks(3.0, 290.0) == [50, 100, 150, 200, 250]
    chart.lines(tmp_path / "a.svg", "a < b", "x", "y", {"one": [(0, 1), (10, 99)], "two": [(0, 2), (10, 3)]}, top=4.0)
    root = xml.etree.ElementTree.parse(tmp_path / "a.svg").getroot()
    lines = [each.get("points", "") for each in root.iter("{http://www.w3.org/2000/svg}polyline")]
    assert len(lines) == 2
    assert lines[0].split()[1].endswith(f",{chart.TOP:.1f}")


def test_two_reports_at_once_keep_each_others_runs(load: Load, tmp_path: Path) -> None:
    runs = load("runs")
    one, two = runs.Results(tmp_path / "results.json"), runs.Results(tmp_path / "results.json")
    one.put("a", {"accuracy": 0.5})
    two.put("b", {"accuracy": 0.25})
    assert runs.Results(tmp_path / "results.json").rows == {"a": {"accuracy": 0.5}, "b": {"accuracy": 0.25}}
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_curve_of_a_run_that_diverged_is_shorter_not_wider(load: Load) -> None:
    runs = load("runs")
    losses = [float(update) for update in range(288)]
    whole, early = runs.thinned(losses, 288), runs.thinned(losses[:50], 288)
    assert len(whole) == runs.POINTS
    assert whole[:8] == early[:8] == [2.5 + 6.0 * at for at in range(8)]
    assert len(early) == 9


def test_settings_that_were_tried_are_told_apart_and_the_best_comes_first(load: Load, tmp_path: Path) -> None:
    runs, report = load("runs"), load("report")
    for name in ("digits search", "letters search"):
        planned = runs.PARTS[name]
        assert len({run.key() for run in planned}) == len({(run.label, run.lr, run.seed) for run in planned})
        assert {run.use for run in planned} == {"choose"}
    results, planned = runs.Results(tmp_path / "results.json"), runs.PARTS["letters search"][:2]
    for run, accuracy in zip(planned, (0.25, 0.5), strict=True):
        results.put(run.key(), {"accuracy": accuracy})
    rows = report.search_table(results, planned).splitlines()[2:]
    assert [row.split(" | ")[-1] for row in rows] == ["50.00 (50.0) |", "25.00 (25.0) |"]
