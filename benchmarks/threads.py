"""The thread backend on two cores: against one thread, against a loop written by hand, against its own simulation.

    python benchmarks/threads.py [--rounds 21] [--only unet transformer matmul python] [--markdown]

Every contender trains the same model on the same batch, checked to give the same gradients first. One step of each
per round; ratios are taken within a round and their median is given, with the quartiles in brackets; a ratio of
throughputs above 1 means faster. CPU time, of all threads together, shows what a contender adds to the arithmetic.
``--markdown`` writes the tables into RESULTS.md.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import models
import rounds
from loops import ByHand, Pipec, Plain, check

import pipec

ONE, HAND = "one thread", "by hand, two threads"
SCHEDULES = ("1f1b", "gpipe")
SITTINGS = 3  # the stages are profiled anew before each, for the machine's pace may change


def contest(build: Callable[[], models.Model], microbatches: int, count: int) -> tuple[rounds.Table, rounds.Table]:
    """The contest of one model, and what the simulation said of pipec's part in it."""
    plain = Plain(build(), microbatches)
    others: dict[str, Any] = {HAND: ByHand(build(), microbatches)}
    others |= {f"pipec {schedule}": Pipec(build(), microbatches, schedule) for schedule in SCHEDULES}
    others["pipec, one device"] = Pipec(build(), microbatches, devices=1)
    for contender in others.values():
        check(contender, contender.model, plain)
    times = {name: rounds.Times([], []) for name in (ONE, *others)}
    simulated: dict[str, list[float]] = {schedule: [] for schedule in SCHEDULES}
    measured: dict[str, list[float]] = {schedule: [] for schedule in SCHEDULES}

    for _ in range(SITTINGS):
        profiled = build()
        x, y = profiled.batch
        costs = pipec.profile(profiled.pipeline(), x, y, microbatches=microbatches)
        for schedule in SCHEDULES:
            simulated[schedule].append(others[f"pipec {schedule}"].plan.simulate(costs).makespan)
        for name, found in rounds.interleave({ONE: plain, **others}, max(1, count // SITTINGS)).items():
            times[name].wall.extend(found.wall)
            times[name].cpu.extend(found.cpu)
        for schedule in SCHEDULES:  # outside the rounds: reading a trace takes time
            for _ in range(3):
                others[f"pipec {schedule}"]()
                measured[schedule].append(others[f"pipec {schedule}"].run.trace().makespan)
    for contender in others.values():
        contender.close()
    title = f"{plain.model.name}, {microbatches} microbatches"
    table = rounds.Table(title, ("", "ms a step", "throughput / one thread", "/ by hand", "CPU ms a step"), [
        (name, rounds.milliseconds(own.wall), str(rounds.ratio(times[ONE].wall, own.wall)),
         str(rounds.ratio(times[HAND].wall, own.wall)), rounds.milliseconds(own.cpu))
        for name, own in times.items()
    ])
    rows = []
    for schedule in SCHEDULES:
        said, was = statistics.median(simulated[schedule]), statistics.median(measured[schedule])
        whole = statistics.median(times[f"pipec {schedule}"].wall) * 1e3
        rows.append((f"{title}, {schedule}", f"{said:.1f}", f"{was:.1f}", f"{was / said:.2f}", f"{whole:.1f}"))
    return table, rounds.Table("Simulated from pipec.profile, and measured", (
        "", "simulated ms", "measured ms", "measured / simulated", "whole step ms"), rows)


def sweep(build: Callable[[], models.Model], counts: tuple[int, ...], count: int, title: str) -> rounds.Table:
    """pipec with 1f1b against one thread, for several numbers of microbatches."""
    rows = []
    for microbatches in counts:
        plain, threads = Plain(build(), microbatches), Pipec(build(), microbatches)
        check(threads, threads.model, plain)
        times = rounds.interleave({ONE: plain, "pipec": threads}, count)
        threads.close()
        ideal = 2 * microbatches / (microbatches + 1)
        rows.append((str(microbatches), rounds.milliseconds(times[ONE].wall),
                     rounds.milliseconds(times["pipec"].wall),
                     str(rounds.ratio(times[ONE].wall, times["pipec"].wall)), f"{ideal:.2f}"))
    return rounds.Table(title, ("microbatches", "one thread ms", "pipec 1f1b ms", "speed-up", "at best"), rows)


def main() -> None:
    rounds.prepare()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 8])
    cases = ("unet", "transformer", "matmul", "python")
    parser.add_argument("--only", nargs="+", choices=cases, default=list(cases))
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    quiet = rounds.Quiet()
    tables, simulations = [], []
    for name, build in (("unet", models.unet), ("transformer", models.transformer)):
        if name in options.only:
            for microbatches in options.microbatches:
                table, simulation = contest(build, microbatches, options.rounds)
                tables.append(table)
                simulations.append(simulation)
    if simulations:
        tables.append(simulations[0]._replace(rows=[row for part in simulations for row in part.rows]))
    if "matmul" in options.only:
        tables.append(sweep(models.matmul, (1, 2, 4, 8, 16), options.rounds, "Stages of 512 x 512 products"))
    if "python" in options.only:
        tables.append(sweep(models.pure_python, (8,), options.rounds, "Stages that hold the interpreter lock"))
    rounds.publish("threads", f"{rounds.machine()}; {options.rounds} rounds; {quiet}.", tables, options.markdown)


if __name__ == "__main__":
    main()
