"""A small ResNet with batch norm reads handwritten digits.

    python examples/resnet_digits.py
    python examples/resnet_digits.py --quick

Data: the 1,797 digits that ship inside scikit-learn. Batch norm takes its statistics from each microbatch, so the
number of microbatches is part of the model here, as it is in every pipeline; its running statistics change once per
microbatch, in order, and recompute does not touch them.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from helpers import gpus, progress
from sklearn.datasets import load_digits
from torch import Tensor, nn

import pipec

BATCH, MICROBATCHES = 128, 4


class Residual(nn.Module):
    def __init__(self, channels: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU(),
            nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out),
        )
        self.side = nn.Identity() if channels == out and stride == 1 else nn.Conv2d(channels, out, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.side(x))


def build(c: int) -> pipec.Pipeline:
    torch.manual_seed(0)
    net = pipec.Pipeline("ResNet")
    image, digit = net.input("image"), net.input("digit")
    x = net.stage("stem", nn.Sequential(nn.Conv2d(1, c, 3, padding=1, bias=False), nn.BatchNorm2d(c), nn.ReLU()), image)
    x = net.stage("block1", Residual(c, c), x)
    x = net.stage("block2", Residual(c, 2 * c, stride=2), x)
    x = net.stage("block3", Residual(2 * c, 2 * c), x)
    x = net.stage("block4", Residual(2 * c, 4 * c, stride=2), x)
    scores = net.stage("head", nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * c, 10)), x)
    net.output(scores)
    net.loss("cross entropy", F.cross_entropy, scores, digit)
    return net


def main(argv: list[str] | None = None) -> dict[str, float]:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="a small net and a few steps")
    quick = options.parse_args(argv).quick
    width, epochs = (8, 1) if quick else (24, 8)
    torch.set_num_threads(1)
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16
    targets = torch.from_numpy(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1))
    train, test = order[:1500], order[1500:]

    net = build(width)
    first = {"image": images[train[:BATCH]], "digit": targets[train[:BATCH]]}
    costs = pipec.profile(net, microbatches=MICROBATCHES, **first)
    plan = pipec.compile(net, 2, MICROBATCHES, recompute="except_last", update="stage", costs=costs)
    print(plan.simulate(), "\n")
    report = pipec.check(net, first, devices=2, microbatches=MICROBATCHES, recompute="except_last")
    print(report, "\n")

    losses: list[float] = []
    with pipec.Runner(net, plan, devices=gpus(2), optimizer=lambda own: torch.optim.Adam(own, lr=3e-3)) as run:
        rows = torch.cat([train[torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch))]
                          for epoch in range(epochs)]).split(BATCH)
        for step in progress(len(rows), lambda: f"loss {losses[-1]:.3f}"):
            # The last batch is smaller: shapes are free in every step.
            losses.append(float(run.step(image=images[rows[step]], digit=targets[rows[step]]).loss))
        result = run.evaluate(image=images[test], digit=targets[test])
    right = float((result.output.argmax(1).cpu() == targets[test]).float().mean())
    seen = int(net.spec.stage("stem").fn[1].num_batches_tracked)
    print(f"{right:.1%} of {len(test)} digits never seen are read right.")
    print(f"Batch norm counted {seen} microbatches in {len(losses)} steps.")
    return {"exact": bool(report), "accuracy": right, "counted": seen, "steps": len(losses)}


if __name__ == "__main__":
    main()
