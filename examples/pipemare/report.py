"""PipeMare's experiments through pipec: run what is missing, then write the report's tables and charts.

    python examples/pipemare/report.py                     what results.json lacks: two hours of one core for all
    python examples/pipemare/report.py --only "digits"     one part: memory, speed or one of the training parts
    python examples/pipemare/report.py --write             only the tables and charts
    python examples/pipemare/report.py --quick             small networks, a few steps, into ./out/pipemare: seconds

Every run is kept in results.json as soon as it ends; stop whenever you like and start again.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import chart
import memory
import runs
import speed
import torch
from methods import compared
from runs import Results, Run
from training import SMALL

import pipec

HERE = Path(__file__).resolve().parent


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown, the first column to the left and the others to the right."""
    lines = [columns, ["---", *["--:"] * (len(columns) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def memory_table(made: dict[str, dict[str, dict[str, Any]]]) -> str:
    rows = [[f"{pipeline}, {schedule}", f"{row['microbatches']}", f"{row['utilisation']:.3f}", f"{row['memory']:.2f}",
             f"{row['versions']}", f"{row['activations']:.0f}"]
            for pipeline, own in made.items() for schedule, row in own.items()]
    return table(["", "microbatches", "utilisation", "weights + optimizer", "versions, worst", "activations"], rows)


def speed_table(made: dict[str, dict[str, Any]]) -> str:
    rows = [[f"{name}, {row['stages']} stages, {row['microbatches']} microbatches", f"{row['plain']:.0f}",
             *(f"{row[way] / row['plain']:.2f}" for way in ("synchronous", "asynchronous"))]
            for name, row in made.items()]
    return table(["", "plain loop, ms", "1f1b / plain", "PipeMare / plain"], rows)


def told(rows: Sequence[dict[str, Any]]) -> str:
    """Accuracy in percent over the seeds: the mean, and each."""
    if not rows:
        return "-"
    each = ["diverged" if "diverged" in row else f"{100 * row['accuracy']:.1f}" for row in rows]
    if "diverged" in each:
        return each[0] if len(set(each)) == 1 else " ".join(each)
    return f"{mean(100 * row['accuracy'] for row in rows):.2f} ({' '.join(each)})"


def training_table(results: Results, planned: Sequence[Run]) -> str:
    """Accuracies by method and learning rate."""
    rates, labels = sorted({run.lr for run in planned}), list(dict.fromkeys(run.label for run in planned))
    cells: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for run, row in results.of(planned):
        cells.setdefault((run.label, run.lr), []).append(row)
    shown = [[label, *(told(cells.get((label, lr), [])) for lr in rates)] for label in labels]
    return table(["", *(f"lr {lr:g}" for lr in rates)], shown)


def best_table(results: Results, planned: Sequence[Run]) -> str:
    """Accuracies, utilisation and asynchronous part of the settings that were chosen, each at its own learning rate."""
    rows = []
    for label, lr in dict.fromkeys((run.label, run.lr) for run in planned):
        own = [(run, row) for run, row in results.of(planned) if (run.label, run.lr) == (label, lr)]
        if not own:
            continue
        run, row = own[0]
        method, devices = run.method, run.method.devices or len(run.task.parts())
        plan = pipec.compile(pipec.chain(devices), devices, method.microbatches, method.policy(), update="stage")
        losses = [r["loss"] for _, r in own if r["loss"] is not None]
        rows.append([label, f"{lr:g}", told([row for _, row in own]), f"{mean(losses):.3f}" if losses else "-",
                     f"{100 * row['asynchronous']:.0f} %", f"{1.0 - plan.simulate().bubble:.2f}"])
    return table(["", "lr", "accuracy", "test loss", "asynchronous", "utilisation"], rows)


def search_table(results: Results, planned: Sequence[Run]) -> str:
    """Every setting that was tried, the best first."""
    settings: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for run, row in results.of(planned):
        settings.setdefault((run.label, run.lr), []).append(row)
    order = sorted(settings, key=lambda own: -mean(row["accuracy"] for row in settings[own]))
    return table(["", "lr", "accuracy"], [[label, f"{lr:g}", told(settings[label, lr])] for label, lr in order])


def curves(results: Results, planned: Sequence[Run], path: Path, title: str, best: bool) -> None:
    """Training loss by update, the mean over the seeds, of each method at one rate: its best, or the least.

    A line ends where the first seed diverged. The best ones of the digits come so near to zero that logs are shown.
    """
    logarithms = best and title.startswith("digits")
    series: dict[str, list[tuple[float, float]]] = {}
    for label in dict.fromkeys(run.label for run in planned):
        own = [(run, row) for run, row in results.of(planned) if run.label == label and row["curve"]]
        if not own:
            continue
        means = {lr: mean(row["accuracy"] for run, row in own if run.lr == lr) for lr in {run.lr for run, _ in own}}
        lr = max(means, key=lambda lr: means[lr]) if best else min(means)
        lines = [row["curve"] for run, row in own if run.lr == lr]
        size = runs.piece(round(own[0][0].epochs * own[0][0].task.epoch))
        points = [mean(parts) for parts in zip(*lines, strict=False)]
        series[f"{label}, {lr:g}"] = [((at + 0.5) * size, math.log10(max(y, 1e-9)) if logarithms else y)
                                     for at, y in enumerate(points)]
    if series:
        up, top = ("training loss, log10", 0.5) if logarithms else ("training loss", 4.0 if "letters" in title else 3.0)
        chart.lines(path, title, "updates", up, series, top=top)


def machine() -> str:
    names = [line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines()
             if line.startswith("model name")] if Path("/proc/cpuinfo").exists() else [platform.processor()]
    return (f"{os.cpu_count()} cores, {names[0] if names else 'unknown'}; Python {platform.python_version()}, "
            f"torch {torch.__version__}; {datetime.datetime.now(datetime.timezone.utc).date()}")


def fill(text: str, sections: dict[str, str]) -> str:
    """Put each section between its marks; one without marks is added at the end."""
    for name, body in sections.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        block = f"{begin}\n\n{body}\n\n{end}"
        found = re.search(f"{re.escape(begin)}.*?{re.escape(end)}", text, re.DOTALL)
        text = text.replace(found[0], block) if found else f"{text.rstrip()}\n\n{block}\n"
    return text


def write(results: Results, parts: dict[str, list[Run]], folder: Path) -> None:
    """Tables into README.md, charts beside it."""
    rows, sections = results.rows, {}
    if "memory" in rows:
        sections["memory"] = memory_table(rows["memory"])
    if "speed" in rows:
        sections["speed"] = f"{speed_table(rows['speed']['rows'])}\n\n{rows['speed']['machine']}."
    for name, planned in parts.items():
        done = [row for _, row in results.of(planned)]
        if not done:
            continue
        best = name.endswith("best")
        made = (best_table if best else search_table if name.endswith("search") else training_table)(results, planned)
        where = rows.get(f"machine of {name}", "")
        sections[name] = f"{made}\n\n{len(done)} of {len(planned)} runs, {where}."
        if name.endswith("search"):
            continue
        curves(results, planned, folder / f"{name.replace(' ', '-')}.svg", f"{name.split()[0]}: training loss", best)
    path = folder / "README.md"
    path.write_text(fill(path.read_text("utf-8") if path.exists() else "# PipeMare\n", sections), encoding="utf-8")


def quick_parts() -> dict[str, list[Run]]:
    """The tables with small networks, one seed and one learning rate."""
    made = {}
    for name, optimizer in (("digits", "momentum"), ("letters", "adamw")):
        made[name] = runs.table_runs(SMALL[name], compared(2, optimizer, 0.5), (0.01,), 1, seeds=(0,))
        made[f"{name} best"] = [made[name][0], made[name][5]]
    return made


def main(argv: list[str] | None = None) -> dict[str, Any]:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", action="append", help="a part of the report; may be given again")
    options.add_argument("--write", action="store_true", help="tables and charts of what is there")
    options.add_argument("--quick", action="store_true", help="small networks and a few steps")
    given = options.parse_args(argv)
    torch.set_num_threads(1)
    folder = Path("out/pipemare") if given.quick else HERE
    folder.mkdir(parents=True, exist_ok=True)
    results, parts = Results(folder / "results.json"), quick_parts() if given.quick else runs.PARTS
    wanted = [] if given.write else given.only or ["memory", *parts, "speed"]
    if unknown := set(wanted) - {"memory", "speed", *parts}:
        options.error(f"no part {', '.join(sorted(unknown))}; parts are memory, speed, {', '.join(parts)}")
    for name in wanted:
        if name == "memory" and name not in results.rows:
            results.put(name, memory.table(given.quick))
        elif name == "speed":
            cases = speed.NARROW if given.quick else {**speed.NARROW, **speed.WIDE}
            made = {name: speed.measure(make, given.quick, 1 if given.quick else 5) for name, make in cases.items()}
            results.put(name, {"rows": made, "machine": machine()})
        elif name in parts:
            results.put(f"machine of {name}", machine())
            results.complete(parts[name], print)
    write(results, parts, folder)
    print(f"Report: {folder / 'README.md'}")
    return {"rows": json.loads(json.dumps(results.rows)), "folder": folder}


if __name__ == "__main__":
    main()
