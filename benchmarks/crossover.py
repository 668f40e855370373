"""Where threads begin to pay: a step in one thread against a thread per device, by the mean duration of a task.

    python benchmarks/crossover.py

Two devices, one intra-op thread each, eight microbatches. Ratios are medians over interleaved rounds; above 1 in the
column "wall" threads are faster, above 1 in "CPU" they cost more. The line drawn is
``pipec.runtime.backends.PAYS_FROM``.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import nn

import pipec

SIZES = ((8, 2), (32, 8), (64, 32), (128, 32), (128, 64), (256, 32), (256, 64), (256, 128))
MICROBATCHES, ROUNDS, STEPS = 8, 12, 3


def runner(width: int, backend: str) -> pipec.Runner:
    torch.manual_seed(0)
    net = pipec.Pipeline("net")
    value, y = net.input("x"), net.input("y")
    for index in range(4):
        block = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
        value = net.stage(f"s{index}", block, value)
    net.loss("mse", nn.functional.mse_loss, value, y)
    return pipec.Runner(net, pipec.compile(net, 2, MICROBATCHES), backend=backend)


def main() -> None:
    torch.set_num_threads(1)
    print(f"{'width':>6}{'rows':>6}{'us per task':>13}{'wall':>8}{'CPU':>8}")
    for width, rows in SIZES:
        x, y = torch.randn(MICROBATCHES * rows, width), torch.randn(MICROBATCHES * rows, width)
        runs = {backend: runner(width, backend) for backend in ("replay", "threads")}
        wall: dict[str, list[float]] = {name: [] for name in runs}
        cpu: dict[str, list[float]] = {name: [] for name in runs}
        for number in range(ROUNDS + 2):
            for name, run in runs.items():
                begin, used = time.perf_counter(), time.process_time()
                for _ in range(STEPS):
                    run.step(x, y)
                if number >= 2:
                    wall[name].append(time.perf_counter() - begin)
                    cpu[name].append(time.process_time() - used)
        timeline = runs["replay"].trace()
        compute = timeline.plan.table.kind != pipec.Kind.COPY
        mean = float((timeline.end - timeline.start)[compute].mean()) * 1e3
        faster = statistics.median(a / b for a, b in zip(wall["replay"], wall["threads"], strict=True))
        dearer = statistics.median(b / a for a, b in zip(cpu["replay"], cpu["threads"], strict=True))
        print(f"{width:>6}{rows:>6}{mean:>13.0f}{faster:>8.2f}{dearer:>8.2f}")
        for run in runs.values():
            run.close()


if __name__ == "__main__":
    main()
