"""Host cost per task with tiny tensors: CPU time of a step against a plain loop of the same stages.

    python benchmarks/host_cost.py

Prints, per number of devices, with pipec's own choice of threads (none for tasks this small) and with threads forced,
the CPU time (user + system, all threads) of a pipec step divided by that of the plain loop (forward, whole-model
backward, microbatch by microbatch), the median over interleaved rounds.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import nn

import pipec

STAGES, MICROBATCHES, ROUNDS, STEPS = 4, 8, 15, 20


def pipeline() -> tuple[pipec.Pipeline, list[nn.Module]]:
    torch.manual_seed(0)
    net = pipec.Pipeline("tiny")
    x, y = net.input("x"), net.input("y")
    modules: list[nn.Module] = []
    value = x
    for index in range(STAGES):
        modules.append(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)))
        value = net.stage(f"s{index}", modules[-1], value)
    net.loss("mse", nn.functional.mse_loss, value, y)
    return net, modules


def plain(modules: list[nn.Module], x: torch.Tensor, y: torch.Tensor) -> None:
    for xs, ys in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
        value = xs
        for module in modules:
            value = module(value)
        (nn.functional.mse_loss(value, ys) / MICROBATCHES).backward()


def main() -> None:
    torch.set_num_threads(1)
    x, y = torch.randn(2 * MICROBATCHES, 8), torch.randn(2 * MICROBATCHES, 8)
    _, modules = pipeline()
    runs = {"plain": lambda: plain(modules, x, y)}
    for devices in (1, 2, 4):
        for backend in ("auto", "threads") if devices > 1 else ("auto",):
            net, _ = pipeline()
            run = pipec.Runner(net, pipec.compile(net, devices, MICROBATCHES), backend=backend)
            name = f"pipec, {devices} devices" + (", threads forced" if backend == "threads" else "")
            runs[name] = lambda run=run: run.step(x, y)
    tasks = 2 * STAGES * MICROBATCHES
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(ROUNDS + 2):
        for name, once in runs.items():
            begin = time.process_time()
            for _ in range(STEPS):
                once()
            if number >= 2:
                times[name].append((time.process_time() - begin) / STEPS / tasks * 1e6)
    base = times["plain"]
    print(f"{'':<34}{'us per task':>12}{'ratio':>8}")
    for name, own in times.items():
        ratio = statistics.median(a / b for a, b in zip(own, base, strict=True))
        print(f"{name:<34}{statistics.median(own):>12.1f}{ratio:>8.2f}")


if __name__ == "__main__":
    main()
