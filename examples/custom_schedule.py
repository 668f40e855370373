"""A schedule of your own in ten lines: compiled, proved, simulated, drawn and run like the built-in ones.

    python examples/custom_schedule.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn

import pipec
from pipec.schedules import B, F, Problem


def waves(problem: Problem, size: int = 4):
    """GPipe in waves: ``size`` microbatches forward, the same ones backward, then the next wave.

    A device keeps ``size`` activations at most, however many microbatches there are.
    """
    for device in range(problem.devices):
        chunks, row = problem.on(device), []
        for first in range(0, problem.microbatches, size):
            wave = range(first, min(first + size, problem.microbatches))
            row += [F(chunk, m) for chunk in chunks for m in wave]
            row += [B(chunk, m) for chunk in reversed(chunks) for m in wave]
        yield row


def build() -> pipec.Pipeline:
    torch.manual_seed(0)
    net = pipec.Pipeline("net")
    value, target = net.input("x"), net.input("y")
    for number in range(4):
        value = net.stage(f"layer{number}", nn.Sequential(nn.Linear(16, 16), nn.Tanh()), value)
    net.loss("mse", nn.functional.mse_loss, value, target)
    return net


def main(argv: list[str] | None = None) -> dict[str, object]:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="no picture")
    options.add_argument("--out", type=Path, default=Path("out"), help="folder of the picture")
    chosen = options.parse_args(argv)

    net = build()
    plans = {
        "gpipe": pipec.compile(net, 4, 8, "gpipe"),
        "waves": pipec.compile(net, 4, 8, waves),
        "1f1b": pipec.compile(net, 4, 8, "1f1b"),
    }
    timelines = {name: plan.simulate() for name, plan in plans.items()}
    print(f"{'schedule':<10}{'makespan':>10}{'bubble':>9}{'activations':>13}")
    for name, timeline in timelines.items():
        print(f"{name:<10}{timeline.makespan:>10g}{timeline.bubble:>9.1%}{max(timeline.peak_share):>13g}")

    batch = {"x": torch.randn(32, 16), "y": torch.randn(32, 16)}
    report = pipec.check(net, batch, plans["waves"])
    print(f"\n{report}")
    if not chosen.quick:
        chosen.out.mkdir(exist_ok=True)
        pipec.draw(list(timelines.values()), chosen.out / "waves.svg", titles=list(timelines))
        print(f"Picture: {chosen.out / 'waves.svg'}")
    return {"exact": bool(report), "makespan": {name: t.makespan for name, t in timelines.items()},
            "peak": {name: max(t.peak_share) for name, t in timelines.items()}}


if __name__ == "__main__":
    main()
