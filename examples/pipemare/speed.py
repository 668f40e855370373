"""The paper's fine-grained networks on one device: 107 and 93 logical devices, run by the one-thread replay.

Each is stepped as PipeMare's asynchronous pipeline with its correction, as 1f1b, and trained plainly on the same
microbatches; the three take turns, and the medians are compared. Narrow networks, where the host's work per task counts
most, then networks as wide as the paper's: ResNet-50 (with fewer rows, for the same memory) and a Transformer of 512.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import fine_nets
import nets
import torch
from training import score_loss

import pipec

LETTERS, LENGTH = 32, 16
Case = tuple[pipec.Pipeline, list[nets.Part], int, Callable[[], tuple[torch.Tensor, ...]]]


def resnet(quick: bool, width: int = 16, rows: int = 32) -> Case:
    """Pipeline, parts, microbatches, and what makes a minibatch: images of 32x32 pixels and labels."""
    parts = fine_nets.resnet50(4, (1, 1)) if quick else fine_nets.resnet50(width)
    rows, pixels, microbatches = (8, 8, 4) if quick else (rows, 32, 8)
    net = nets.pipeline("ResNet", parts, ("image",), "target", score_loss)
    return net, parts, microbatches, lambda: (torch.randn(rows, 3, pixels, pixels), torch.randint(10, (rows,)))


def transformer(quick: bool, width: int = 128, rows: int = 38) -> Case:
    """Pipeline, parts, microbatches, and what makes a minibatch: letters, shifted ones, and what to guess."""
    sizes = (16, 1, 2, LENGTH) if quick else (width, 6, 4, 32)
    parts = fine_nets.transformer(LETTERS, *sizes)
    rows, length, microbatches = (8, LENGTH, 4) if quick else (rows, 32, 19)
    net = nets.pipeline("Transformer", parts, ("text", "shifted"), "target", score_loss)

    def batch() -> tuple[torch.Tensor, ...]:
        text = torch.randint(1, LETTERS, (rows, length))
        return text, text.roll(1, 1), text

    return net, parts, microbatches, batch


NARROW = {"ResNet": resnet, "Transformer": transformer}
WIDE = {
    "ResNet, width 64": partial(resnet, width=64, rows=8),
    "Transformer, width 512": partial(transformer, width=512),
}


def plain(parts: list[nets.Part], inputs: tuple[str, ...], microbatches: int, lr: float) -> Callable[..., float]:
    """The plain loop: every microbatch forward and backward in turn, then one update of all weights."""
    own = torch.optim.SGD([p for part in parts for p in part.module.parameters()], lr, momentum=0.9)

    def step(*batch: torch.Tensor) -> float:
        total = 0.0
        for pieces in zip(*(rows.chunk(microbatches) for rows in batch), strict=True):
            values: dict[str, Any] = dict(zip(inputs, pieces[:-1], strict=True))
            for part in parts:
                values[part.name] = part.module(*[values[name] for name in part.reads])
            loss = score_loss(values[parts[-1].name], pieces[-1]) / microbatches
            loss.backward()
            total += float(loss.detach())
        own.step()
        own.zero_grad()
        return total

    return step


def measure(make: Callable[[bool], Any], quick: bool, rounds: int) -> dict[str, Any]:
    """Medians over the rounds in milliseconds of CPU time per minibatch, once the pipeline is full.

    Returns:
        ``stages``, ``microbatches``, ``plain``, ``synchronous`` (1f1b), ``asynchronous`` (PipeMare with T2);
        ``finite``: all losses were.
    """
    torch.manual_seed(0)
    net, parts, microbatches, batch = make(quick)
    stages, lr, inputs = len(parts), 1e-4, tuple(each.name for each in net.spec.inputs)[:-1]
    loops: dict[str, Callable[..., float]] = {"plain": plain(parts, inputs, microbatches, lr)}
    schedules = {"synchronous": "1f1b", "asynchronous": pipec.PipeMare()}
    runners = {}
    for name, schedule in schedules.items():
        net = make(quick)[0]  # each loop trains a network of its own
        plan = pipec.compile(net, stages, microbatches, schedule=schedule, update="stage")
        runner = runners[name] = pipec.Runner(net, plan, ["cpu"] * stages, backend="replay",
                                              optimizer=lambda own: torch.optim.SGD(own, lr, momentum=0.9))
        loops[name] = lambda *rows, runner=runner: max(map(float, runner.step(*rows).losses.values()), default=0.0)
    fill = (2 * stages - 1) // microbatches + 2
    times: dict[str, list[float]] = {name: [] for name in loops}
    finite = True
    for round_ in range(rounds + fill):
        rows = batch()
        for name, loop in loops.items():
            if round_ < fill - 1 and name in ("plain", "synchronous"):
                continue  # only the asynchronous ones have a pipeline to fill
            began = time.process_time()
            finite = loop(*rows) < 1e6 and finite
            if round_ >= fill:
                times[name].append((time.process_time() - began) * 1e3)
    for runner in runners.values():
        runner.close()
    medians = {name: statistics.median(own) for name, own in times.items()}
    return {"stages": stages, "microbatches": microbatches, "finite": finite, **medians}
