"""A residual network on handwritten digits: the same script in one process and in many.

    python examples/distributed.py                                            # both devices in this process
    torchrun --nproc-per-node 2 examples/distributed.py                       # a process per device
    torchrun --nproc-per-node 4 examples/distributed.py --replicas 2          # two replicas of two devices
    torchrun --nproc-per-node 2 examples/distributed.py --resume out/digits   # goes on with what was saved
    torchrun --nproc-per-node 2 examples/distributed.py --gpus                # a GPU per process, over NCCL

Stages are declared with ``pipec.lazy``, so that a process makes only its own. The losses are the same bits in one
process and in two; with replicas each process reads its own part of every batch.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import pipec

BATCH, MICROBATCHES, DEVICES = 256, 8, 2


class Stem(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, width), nn.ReLU())

    def forward(self, image: Tensor) -> Tensor:
        return self.net(image.flatten(1))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.1),
                                 nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.net(x)


class Head(nn.Module):
    """Reads the last block, and the stem over a long skip that goes straight from its process to this one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Linear(2 * width, 10)

    def forward(self, deep: Tensor, early: Tensor) -> Tensor:
        return self.net(torch.cat([deep, early], 1))


def build(width: int) -> pipec.Pipeline:
    net = pipec.Pipeline("digits")
    image, digit = net.input("image"), net.input("digit")
    value = first = net.stage("stem", pipec.lazy(Stem, width), image)
    for number in range(4):
        value = net.stage(f"block{number}", pipec.lazy(Block, width), value)
    scores = net.stage("head", pipec.lazy(Head, width), value, pipec.skip(first))
    net.output(scores)
    net.loss("cross entropy", F.cross_entropy, scores, digit)
    return net


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--resume", help="a folder that an earlier run has saved")
    parser.add_argument("--save", default="out/digits")
    parser.add_argument("--gpus", action="store_true", help="run on GPUs, in one process on those there are in turn")
    parser.add_argument("--quick", action="store_true", help="a few small steps")
    options = parser.parse_args(arguments)
    width, steps = (32, 6) if options.quick else (256, 60)

    torch.set_num_threads(1)
    many = "RANK" in os.environ  # torchrun starts every process with its rank
    if many:
        dist.init_process_group("cpu:gloo,cuda:nccl" if options.gpus else "gloo")
    rank = dist.get_rank() if many else 0

    torch.manual_seed(0)
    net = build(width)
    plan = pipec.compile(net, DEVICES, MICROBATCHES, "1f1b", update="stage", data_parallel=options.replicas)
    if rank == 0:
        print(plan.simulate())

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    losses = []
    devices = "cuda" if options.gpus else None
    with pipec.Runner(net, plan, devices, lambda own: torch.optim.AdamW(own, lr=1e-3)) as run:
        if options.resume:
            run.load(options.resume)
        part = rank // DEVICES  # the replica that this process belongs to
        for step in range(steps):
            batch = torch.randint(len(images), (BATCH,), generator=torch.Generator().manual_seed(step))
            own = batch.chunk(options.replicas)[part]
            result = run.step(image=images[own], digit=labels[own])
            losses.append(float(result.loss))
            if rank == 0 and step % 10 == 0:
                print(f"step {step}: loss {losses[-1]:.4f}")
        if rank == 0:
            print(f"step {steps - 1}: loss {losses[-1]!r}; process 0 holds {len(list(run.parameters()))} tensors")
        run.save(options.save)
    if many:
        dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
