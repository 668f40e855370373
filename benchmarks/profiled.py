"""How near the time simulated from ``pipec.profile`` comes to the time of a step, for whole and for split backwards.

    python benchmarks/profiled.py [--rounds 15] [--markdown]

One plan per schedule on two CPU devices. The stages are profiled anew before each third of the rounds; in a round every
plan runs a step, whose makespan is read from its trace.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import models
import rounds

import pipec
from pipec.ir import Kind

SCHEDULES = ("1f1b", "zb-h1", "interleaved-1f1b", "interleaved-zero-bubble", "zb-v")
SITTINGS = 3
MICROBATCHES = 8


def compared(build: Callable[[], models.Model], count: int) -> rounds.Table:
    """The schedules of one model, simulated and measured."""
    model = build()
    net, (x, y) = model.pipeline(), model.batch
    runs = {name: pipec.Runner(net, pipec.compile(net, 2, MICROBATCHES, name)) for name in SCHEDULES}
    said: dict[str, list[float]] = {name: [] for name in runs}
    was: dict[str, list[float]] = {name: [] for name in runs}
    whole, halves = [], []
    for _ in range(SITTINGS):
        costs = pipec.profile(net, x, y, microbatches=MICROBATCHES)
        each = {kind: sum(costs.duration(kind, stage.name) for stage in net.spec.stages) for kind in Kind}
        whole.append(each[Kind.BACKWARD])
        halves.append(each[Kind.BACKWARD_INPUT] + each[Kind.BACKWARD_WEIGHT])
        for name, run in runs.items():
            said[name].append(run.plan.simulate(costs).makespan)
        for _ in range(max(1, count // SITTINGS)):
            for name, run in runs.items():
                run.step(x, y)
                was[name].append(run.trace().makespan)
    for run in runs.values():
        run.close()
    share = statistics.median(halves) / statistics.median(whole)
    title = f"{model.name}, {MICROBATCHES} microbatches; the halves together take {share:.2f} of the whole backward"
    rows = []
    for name in runs:
        simulated, measured = statistics.median(said[name]), statistics.median(was[name])
        rows.append((name, f"{simulated:.1f}", f"{measured:.1f}", f"{measured / simulated:.2f}"))
    return rounds.Table(title, ("", "simulated ms", "measured ms", "measured / simulated"), rows)


def main() -> None:
    rounds.prepare()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    quiet = rounds.Quiet()
    tables = [compared(build, options.rounds) for build in (models.unet, models.transformer, models.matmul)]
    rounds.publish("profiled", f"{rounds.machine()}; {options.rounds} rounds; {quiet}.", tables, options.markdown)


if __name__ == "__main__":
    main()
