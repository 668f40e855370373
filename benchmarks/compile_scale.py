"""CPU time and memory of compile, verify and simulate as plans grow, up to the largest published runs.

    python benchmarks/compile_scale.py [--schedules gpipe 1f1b] [--repeat 3]

CPU time is the best of the repeats. ``per task`` should stay flat and ``ratio`` should be that of the task
counts: the last column divides the two, and 1 means in proportion. Peak memory is what Python and numpy
allocate in one pass over all three.
"""

from __future__ import annotations

import argparse
import gc
import time
import tracemalloc
from collections.abc import Callable
from typing import NamedTuple

import pipec

SHAPES = ((16, 128), (32, 128), (32, 256), (64, 256), (64, 512))


class Row(NamedTuple):
    tasks: int
    compile: float  # without its verify
    verify: float
    simulate: float
    peak: int

    @property
    def total(self) -> float:
        return self.compile + self.verify + self.simulate


def cpu(work: Callable[[], object], repeat: int) -> float:
    """Seconds of CPU time, the best of ``repeat``."""
    best = float("inf")
    for _ in range(repeat):
        gc.collect()
        begin = time.process_time()
        work()
        best = min(best, time.process_time() - begin)
    return best


def measure(schedule: str, devices: int, microbatches: int, repeat: int) -> Row:
    def compiled() -> pipec.Plan:
        return pipec.compile(pipec.chain(devices), devices, microbatches, schedule)

    def simulated(plan: pipec.Plan) -> object:
        timeline = plan.simulate()
        return timeline.makespan, timeline.bubble, timeline.peak_share

    plan = compiled()
    verify = cpu(plan.verify, repeat)
    compile_ = cpu(compiled, repeat) - verify
    simulate = cpu(lambda: simulated(plan), repeat)
    tracemalloc.start()
    simulated(compiled())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return Row(len(plan), compile_, verify, simulate, peak)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schedules", nargs="+", default=["gpipe", "1f1b"])
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    print(
        f"{'schedule':<18}{'devices':>8}{'micro':>7}{'tasks':>9}{'compile':>9}{'verify':>9}{'simulate':>9}{'total':>9}"
        f"{'us/task':>9}{'MiB':>7}{'ratio':>7}{'/tasks':>8}"
    )
    for schedule in options.schedules:
        before: Row | None = None
        for devices, microbatches in SHAPES:
            row = measure(schedule, devices, microbatches, options.repeat)
            ratio = row.total / before.total if before else 1.0
            growth = ratio / (row.tasks / before.tasks) if before else 1.0
            print(
                f"{schedule:<18}{devices:>8}{microbatches:>7}{row.tasks:>9}{row.compile:>9.3f}{row.verify:>9.3f}"
                f"{row.simulate:>9.3f}{row.total:>9.3f}{row.total / row.tasks * 1e6:>9.1f}{row.peak / 2**20:>7.0f}"
                f"{ratio:>7.2f}{growth:>8.2f}",
                flush=True,
            )
            before = row


if __name__ == "__main__":
    main()
