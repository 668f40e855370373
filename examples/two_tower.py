"""Two towers, side by side on two devices, and a stage that merges them: do two handwritten digits match?

    python examples/two_tower.py
    python examples/two_tower.py --quick

Data: pairs of the digits that ship inside scikit-learn. The towers need nothing of each other, so the plan lets them
run at the same time; nothing has to be said about that, it follows from the edges.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from helpers import gpus, progress
from sklearn.datasets import load_digits
from torch import Tensor, nn

import pipec

BATCH, MICROBATCHES = 256, 8


def tower(width: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())


class Match(nn.Module):
    """One score per pair: above zero, both show the same digit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.score = nn.Sequential(nn.Linear(3 * width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.score(torch.cat([left, right, (left - right).abs()], 1)).squeeze(1)


def build(width: int) -> pipec.Pipeline:
    torch.manual_seed(0)
    net = pipec.Pipeline("two towers")
    left, right, same = net.input("left"), net.input("right"), net.input("same")
    a = net.stage("left tower", tower(width), left, device=0)
    b = net.stage("right tower", tower(width), right, device=1)
    score = net.stage("match", Match(width), a, b, device=1)
    net.output(score)
    net.loss("match", F.binary_cross_entropy_with_logits, score, same)
    return net


def pairs(images: Tensor, digits: Tensor, rows: Tensor, count: int, draw: torch.Generator) -> dict[str, Tensor]:
    """``count`` pairs out of ``rows``, half of them of one digit."""
    first = rows[torch.randint(len(rows), (count,), generator=draw)]
    second = rows[torch.randint(len(rows), (count,), generator=draw)]
    for i in range(0, count, 2):
        alike = rows[digits[rows] == digits[first[i]]]
        second[i] = alike[torch.randint(len(alike), (1,), generator=draw)]
    return {"left": images[first], "right": images[second], "same": (digits[first] == digits[second]).float()}


def main(argv: list[str] | None = None) -> dict[str, float]:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="a small net and a few steps")
    quick = options.parse_args(argv).quick
    width, steps = (64, 60) if quick else (256, 300)
    torch.set_num_threads(1)
    draw, data = torch.Generator().manual_seed(1), load_digits()
    images, digits = torch.from_numpy(data.images).float() / 16, torch.from_numpy(data.target)
    order = torch.randperm(len(images), generator=draw)
    train, test = order[:1400], order[1400:]
    example = pairs(images, digits, train, BATCH, draw)

    net = build(width)
    costs = pipec.profile(net, microbatches=MICROBATCHES, **example)
    plan = pipec.compile(net, 2, MICROBATCHES, update="all", costs=costs)
    timeline = plan.simulate()
    begun = {net.spec.stages[i.task.stage].name: i.start for i in reversed(list(timeline.intervals))
             if i.task.kind is pipec.Kind.FORWARD}
    print(timeline, "\n")
    print("The first forward of each stage begins at (ms):",
          ", ".join(f"{name} {begun[name]:.2f}" for name in reversed(begun)), "\n")
    report = pipec.check(net, example, devices=2, microbatches=MICROBATCHES)
    print(report, "\n")

    optimizer = torch.optim.Adam([p for s in net.spec.stages for p in s.fn.parameters()], lr=1e-3)
    losses: list[float] = []
    with pipec.Runner(net, plan, devices=gpus(2), optimizer=optimizer) as run:
        for _ in progress(steps, lambda: f"loss {losses[-1]:.3f}"):
            losses.append(float(run.step(**pairs(images, digits, train, BATCH, draw)).loss))
        unseen = pairs(images, digits, test, 1000, draw)
        score = run.evaluate(**unseen).output.cpu()
    right = float(((score > 0) == (unseen["same"] > 0)).float().mean())
    share = float(unseen["same"].mean())
    print(f"{right:.1%} of 1000 pairs of unseen digits are told right; always the same answer would have "
          f"{max(share, 1 - share):.1%}.")
    return {"exact": bool(report), "accuracy": right, "blind": max(share, 1 - share),
            "together": begun["left tower"] == begun["right tower"] == 0.0}


if __name__ == "__main__":
    main()
