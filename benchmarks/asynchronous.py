"""Asynchronous pipelines: the gain that no bubble brings on two devices, and the cost of emulating many on one.

    python benchmarks/asynchronous.py [--rounds 15] [--only steady emulation] [--markdown]

*Steady state*: on two CPU threads one step of a full asynchronous pipeline against one of 1f1b and gpipe, the same
model and minibatch, optimizer steps included, M = 2, 4, 8 microbatches; beside it what ``plan.simulate`` predicts from
a profile. One step of each per round; ratios are taken within a round and their median is given, with the quartiles in
brackets. *By hand* is a loop of two threads without a flush, written for two devices and no others, which keeps no old
weights and trains nothing: what the machine allows. PipeMare is run as it is by default, with corrected weights kept
for an update, and without correction. *Emulation*: the replay backend runs plans of 107 devices, a convolution layer
each, in one thread, against a plain loop over the same microbatches with the same optimizers; 1f1b tells what of it
any plan of so many devices costs.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import models
import rounds
import torch
from loops import WithoutFlush, clear
from torch import Tensor, nn
from torch.nn import functional as F

import pipec

STEADY: dict[str, Any] = {
    "gpipe": "gpipe", "1f1b": "1f1b", "pipedream": "pipedream", "live-weights": "live-weights", "pipemare": "pipemare",
    "pipemare, kept": pipec.PipeMare(keep_corrected=True), "pipemare, no T2": pipec.PipeMare(correction=None),
}
FILL = 4  # steps before the first round, at least: two devices are full then
EMULATED = ("1f1b", "pipedream", "pipemare")


def optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-4, momentum=0.9)


class Training:
    """Steps of one schedule on two threads, updates included."""

    def __init__(self, model: models.Model, microbatches: int, schedule: Any, costs: pipec.Costs) -> None:
        self.model = model
        clear(model)
        net = model.pipeline()
        self.plan = pipec.compile(net, 2, microbatches, schedule, placement=model.placement(2), update="stage",
                                  costs=costs)
        self.run = pipec.Runner(net, self.plan, optimizer=optimizer, backend="threads")
        for _ in range(max(FILL, self.plan.minibatches)):
            self()

    def __call__(self) -> Any:
        return self.run.step(*self.model.batch)


def steady(build: Any, microbatches: int, count: int) -> rounds.Table:
    """One model at one number of microbatches: each schedule's step, and its gain over gpipe and 1f1b."""
    profiled = build()
    costs = pipec.profile(profiled.pipeline(), *profiled.batch, microbatches=microbatches)
    contenders = {name: Training(build(), microbatches, own, costs) for name, own in STEADY.items()}
    said = {}
    for name, contender in contenders.items():
        timeline = contender.plan.simulate(costs)
        said[name] = timeline.step
    byhand = WithoutFlush(build(), microbatches, optimizer)
    for _ in range(FILL):
        byhand()
    times = rounds.interleave(contenders | {"by hand": byhand}, count)
    for contender in contenders.values():
        contender.run.close()
    byhand.close()
    rows = [
        (name, rounds.milliseconds(own.wall), str(rounds.ratio(times["gpipe"].wall, own.wall)),
         f"{said['gpipe'] / said[name]:.2f}" if name in said else "",
         str(rounds.ratio(times["1f1b"].wall, own.wall)),
         f"{said['1f1b'] / said[name]:.2f}" if name in said else "")
        for name, own in times.items()
    ]
    return rounds.Table(f"{profiled.name}, {microbatches} microbatches, two threads", (
        "", "ms a step", "throughput / gpipe", "predicted", "throughput / 1f1b", "predicted"), rows)


class Layer(nn.Module):
    """One stage of a deep network of convolutions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.GroupNorm(4, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.norm(self.conv(x)))


class Plain:
    """The same microbatches in a loop: whole-model backward, then an optimizer step per stage."""

    def __init__(self, layers: list[nn.Module], batch: tuple[Tensor, Tensor], microbatches: int) -> None:
        self.layers, self.batch, self.microbatches = layers, batch, microbatches
        self.optimizers = [optimizer(layer.parameters()) for layer in layers]

    def __call__(self) -> None:
        for x, y in zip(*(part.chunk(self.microbatches) for part in self.batch), strict=True):
            for layer in self.layers:
                x = layer(x)
            (F.mse_loss(x, y) / self.microbatches).backward()
        for made in self.optimizers:
            made.step()
            made.zero_grad()


def emulation(devices: int, microbatches: int, count: int) -> rounds.Table:
    """A plan of many devices in one thread against the plain loop."""
    width, size, rows = 16, 16, 8

    def layers() -> list[nn.Module]:
        torch.manual_seed(0)
        return [Layer(width) for _ in range(devices)]

    torch.manual_seed(1)
    shape = (rows * microbatches, width, size, size)
    batch = torch.randn(shape), torch.randn(shape)
    contenders: dict[str, Any] = {"plain loop": Plain(layers(), batch, microbatches)}
    for schedule in EMULATED:
        net = pipec.Pipeline("deep")
        value, target = net.input("x"), net.input("y")
        for number, layer in enumerate(layers()):
            value = net.stage(f"layer{number}", layer, value)
        net.loss("loss", F.mse_loss, value, target)
        plan = pipec.compile(net, devices, microbatches, schedule, update="stage")
        run = pipec.Runner(net, plan, devices=["cpu"] * devices, optimizer=optimizer, backend="replay")
        for _ in range(plan.minibatches):
            run.step(*batch)
        contenders[f"pipec {schedule}"] = lambda run=run: run.step(*batch)
    times = rounds.interleave(contenders, count)
    base = times["plain loop"].wall
    return rounds.Table(f"{devices} devices in one thread, {microbatches} microbatches of {rows} images", (
        "", "ms a step", "time / plain loop", "us a task"), [
        (name, rounds.milliseconds(own.wall), str(rounds.ratio(own.wall, base)),
         f"{statistics.median(own.wall) * 1e6 / (2 * devices * microbatches):.0f}")
        for name, own in times.items()
    ])


def main() -> None:
    rounds.prepare()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--devices", type=int, default=107)
    cases = ("steady", "emulation")
    parser.add_argument("--only", nargs="+", choices=cases, default=list(cases))
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    quiet = rounds.Quiet()
    tables = []
    if "steady" in options.only:
        tables += [steady(build, m, options.rounds) for build in (models.unet, models.transformer)
                   for m in options.microbatches]
    if "emulation" in options.only:
        tables.append(emulation(options.devices, 8, max(3, options.rounds // 3)))
    rounds.publish("asynchronous", f"{rounds.machine()}; {options.rounds} rounds; {quiet}.", tables, options.markdown)


if __name__ == "__main__":
    main()
