"""Which training runs the report is made of, and where their figures are kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import tried
from methods import Method, compared
from training import DIGITS, LETTERS, Task, train

POINTS = 48  # of a training curve
SEEDS, MORE_SEEDS = (0, 1, 2), (0, 1, 2, 3, 4, 5)


@dataclass(frozen=True)
class Run:
    """One training run of one method."""

    task: Task
    label: str
    method: Method
    lr: float
    seed: int
    epochs: float
    use: str = "test"

    def key(self) -> str:
        return (f"{self.task.name}: {self.method.key()} lr={self.lr} seed={self.seed} epochs={self.epochs:g} "
                f"use={self.use}")


def table_runs(task: Task, methods: dict[str, Method], rates: Sequence[float], epochs: float,
               seeds: Sequence[int] = SEEDS) -> list[Run]:
    return [Run(task, label, method, lr, seed, epochs)
            for seed in seeds for label, method in methods.items() for lr in rates]


# Chosen by the search of tried.py.
MARE = Method("pipemare", correction=0.135, reschedule=0.8, warm=0.2, optimizer="adamw", momentum=0.5)
DREAM = Method("pipedream", reschedule=0.8, warm=0.2, optimizer="adamw", momentum=0.5)
FEW = replace(MARE, inflight="1f1b", momentum=0.9, devices=4)
DIGITS_BEST = [
    ("synchronous, SGD", Method(), 0.1),
    ("synchronous, AdamW", Method(optimizer="adamw"), 0.02),
    ("synchronous, AdamW", Method(optimizer="adamw"), 0.04),
    ("synchronous, AdamW beta 0.5", Method(optimizer="adamw", momentum=0.5), 0.02),
    ("PipeMare, T1 + T2 + T3, AdamW", replace(MARE, momentum=0.9), 0.01),
    ("PipeMare, T1 + T2 + T3, AdamW beta 0.5", MARE, 0.02),
    ("PipeMare 1f1b, T1 + T3, SGD momentum 0.5",
     Method("pipemare", inflight="1f1b", reschedule=0.25, warm=0.2, momentum=0.5), 0.1),
    ("PipeDream, T1 + T3, AdamW beta 0.5", DREAM, 0.04),
    ("prediction, T1 + T3, AdamW beta 0.5", replace(DREAM, schedule="predicted", inflight="1f1b"), 0.02),
    ("PipeMare 1f1b, T1 + T2 + T3, AdamW, 8 microbatches", replace(FEW, devices=0, microbatches=8), 0.02),
    ("PipeMare 1f1b, T1 + T2 + T3, AdamW, 4 devices", FEW, 0.02),
    ("PipeMare 1f1b, T1 + T2 + T3, AdamW, 4 devices", FEW, 0.04),
    ("PipeMare 1f1b, T1 + T2 + T3, AdamW beta 0.5, 4 devices", replace(FEW, momentum=0.5), 0.02),
]
DIGITS_LONGER = [DIGITS_BEST[number] for number in (1, 2, 5, 6)]  # with twice the epochs on both sides
LETTERS_BEST = [
    ("synchronous, AdamW", Method(optimizer="adamw", devices=4), 0.01),
    ("PipeMare 1f1b, T1 + T2 + T3, AdamW beta 0.5", replace(MARE, inflight="1f1b", devices=4), 0.01),
]


def best_runs(task: Task, methods: Sequence[tuple[str, Method, float]], epochs: float,
              seeds: Sequence[int] = MORE_SEEDS) -> list[Run]:
    return [Run(task, label, method, lr, seed, epochs) for seed in seeds for label, method, lr in methods]


def search_runs(task: Task, settings: Sequence[tried.Tried], epochs: float) -> list[Run]:
    """Settings tried on the way, on the rows kept for choosing."""
    return [Run(task, method.words(), method, lr, seed, epochs, "choose")
            for method, lr, seeds in settings for seed in seeds]


PARTS: dict[str, list[Run]] = {
    "digits best": best_runs(DIGITS, DIGITS_BEST, 24),
    "digits longer best": best_runs(DIGITS, DIGITS_LONGER, 48, SEEDS),
    "letters best": best_runs(LETTERS, LETTERS_BEST, 16),
    "digits": table_runs(DIGITS, compared(4, "momentum", 0.25), (0.03, 0.1), 12),
    "letters": table_runs(LETTERS, compared(2, "adamw", 0.625), (0.003, 0.01), 8),
    "digits search": search_runs(DIGITS, tried.DIGITS, 24),
    "letters search": search_runs(LETTERS, tried.LETTERS, 16),
}


class Results:
    """Figures by run, in a JSON file that is written after every run, so that a stopped report goes on where it was.

    Two processes may work on different parts of the report at once: each keeps what the other has written.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.rows = path, self._written(path)

    @staticmethod
    def _written(path: Path) -> dict[str, Any]:
        rows: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
        return rows

    def put(self, key: str, row: Any) -> None:
        self.rows = {**self._written(self.path), key: row}
        text = ",\n".join(f"{json.dumps(name)}: {json.dumps(own)}" for name, own in self.rows.items())
        new = self.path.with_suffix(".new")
        new.write_text("{\n" + text + "\n}\n", encoding="utf-8")
        new.replace(self.path)

    def complete(self, runs: Sequence[Run], tell: Callable[[str], object]) -> None:
        """Do the runs that are not there yet; the curve is kept of those that are reported."""
        missing = [run for run in runs if run.key() not in self.rows]
        for number, run in enumerate(missing, 1):
            row = train(run.task, run.method, run.lr, run.seed, run.epochs, run.use)
            curve, took = thinned(row.pop("losses"), round(run.epochs * run.task.epoch)), row.pop("seconds")
            kept = row if run.use == "choose" else {**row, "curve": curve}
            self.put(run.key(), {name: rounded(value) for name, value in kept.items()})
            tell(f"{number}/{len(missing)} {run.key()}: {row['accuracy']:.4f} in {took:.0f} s")

    def of(self, runs: Sequence[Run]) -> Iterator[tuple[Run, Any]]:
        return ((run, self.rows[run.key()]) for run in runs if run.key() in self.rows)


def rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [rounded(part) for part in value]
    return value if value is None else round(value, 4)


def piece(updates: int) -> int:
    """How many updates each point of a training curve is the mean of, so that there are at most :data:`POINTS`."""
    return max(1, -(-updates // POINTS))


def thinned(losses: Sequence[float], updates: int) -> list[float]:
    """The curve of a run of so many updates; a shorter one where it diverged before its end."""
    size = piece(updates)
    return [mean(losses[at : at + size]) for at in range(0, len(losses), size)]
