"""Host cost per task with tiny tensors: CPU time of a step against a plain loop of the same stages.

    python benchmarks/host_cost.py

Prints, per number of devices, with pipec's own choice of threads (none for tasks this small) and with threads forced,
the CPU time (user + system, all threads) of a pipec step divided by that of the plain loop (forward, whole-model
backward, microbatch by microbatch), the median over interleaved rounds. Two more kinds of rows say what of it no
pipeline can avoid: plain loops in several threads at once that share nothing (the price of Python's lock alone), and
a plain loop with detached borders, one autograd call per stage (what a step that can stop between stages needs).
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from functools import partial

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


def detached(modules: list[nn.Module], x: torch.Tensor, y: torch.Tensor) -> None:
    """The plain loop with every stage's graph of its own, as a pipeline needs it."""
    for xs, ys in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
        leaves, results = [xs], []
        for module in modules:
            results.append(module(leaves[-1]))
            leaves.append(results[-1].detach().requires_grad_())
        (nn.functional.mse_loss(leaves[-1], ys) / MICROBATCHES).backward()
        for result, leaf in zip(reversed(results), reversed(leaves), strict=False):
            result.backward(leaf.grad)


def together(loops: list[Callable[[], None]]) -> None:
    """Every loop ``STEPS`` times, each in a thread of its own."""
    def work(once: Callable[[], None]) -> None:
        torch.set_num_threads(1)
        for _ in range(STEPS):
            once()

    threads = [threading.Thread(target=work, args=(once,)) for once in loops]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> None:
    torch.set_num_threads(1)
    x, y = torch.randn(2 * MICROBATCHES, 8), torch.randn(2 * MICROBATCHES, 8)
    _, modules = pipeline()
    runs: dict[str, Callable[[], object]] = {"plain": lambda: plain(modules, x, y)}
    runs["plain, detached borders"] = lambda: detached(modules, x, y)
    crowds = {
        f"plain, {count} threads, a loop each": [partial(plain, pipeline()[1], x, y) for _ in range(count)]
        for count in (2, 4)
    }
    for devices in (1, 2, 4):
        for backend in ("auto", "threads") if devices > 1 else ("auto",):
            net, _ = pipeline()
            run = pipec.Runner(net, pipec.compile(net, devices, MICROBATCHES), backend=backend)
            name = f"pipec, {devices} devices" + (", threads forced" if backend == "threads" else "")
            runs[name] = lambda run=run: run.step(x, y)
    tasks = 2 * STAGES * MICROBATCHES
    times: dict[str, list[float]] = {name: [] for name in (*runs, *crowds)}
    for number in range(ROUNDS + 2):
        for name, once in runs.items():
            begin = time.process_time()
            for _ in range(STEPS):
                once()
            if number >= 2:
                times[name].append((time.process_time() - begin) / STEPS / tasks * 1e6)
        for name, loops in crowds.items():
            begin = time.process_time()
            together(loops)
            if number >= 2:
                times[name].append((time.process_time() - begin) / STEPS / tasks / len(loops) * 1e6)
    base = times["plain"]
    print(f"{'':<36}{'us per task':>12}{'ratio':>8}")
    for name, own in times.items():
        ratio = statistics.median(a / b for a, b in zip(own, base, strict=True))
        print(f"{name:<36}{statistics.median(own):>12.1f}{ratio:>8.2f}")


if __name__ == "__main__":
    main()
