"""Long sequences: every microbatch is cut into slices along its sequence, and layers carry on what later slices need.

    python examples/long_sequences.py
    python examples/long_sequences.py --quick

Data: the source text of Python's own standard library. Attention carries the keys and values of earlier slices, a GRU
its state. With one microbatch at a time there is nothing else to fill a pipeline with.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
import torch.nn.functional as F
from char_transformer import LETTERS, library_source
from helpers import progress
from torch import Tensor, nn

import pipec

DEVICES, MICROBATCHES, SLICES, BATCH = 2, 2, 4, 4


class Attention(nn.Module):
    """Attention to the letters before, those of earlier slices included, added to what came in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.join = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, carry: list[tuple[Tensor, Tensor]] | None = None) -> tuple[Tensor, Any]:
        q, k, v = self.qkv(self.norm(x)).chunk(3, 2)
        carry = [*(carry or []), (k, v)]  # appended to, so that slices share what earlier ones made
        keys, values = (torch.cat(parts, 1) for parts in zip(*carry, strict=True))
        mask = torch.ones(q.shape[1], keys.shape[1], dtype=torch.bool).tril(keys.shape[1] - q.shape[1])
        return x + self.join(F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)), carry


class Recurrent(nn.Module):
    """A GRU over the sequence; the next slice begins in the state in which this one ends."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.net = nn.LayerNorm(width), nn.GRU(width, width, batch_first=True)

    def forward(self, x: Tensor, carry: Tensor | None = None) -> tuple[Tensor, Tensor]:
        out, state = self.net(self.norm(x), carry)
        return x + out, state


def build(width: int) -> pipec.Pipeline:
    torch.manual_seed(0)
    net = pipec.Pipeline("long")
    text, following = net.input("text", slice_dim=1), net.input("following", slice_dim=1)
    x = net.stage("embed", nn.Embedding(len(LETTERS), width), text)
    for number in range(DEVICES):
        x = net.stage(f"recurrent{number}", Recurrent(width), x, carry=True)
        x = net.stage(f"attention{number}", Attention(width), x, carry=True)
    scores = net.stage("head", nn.Sequential(nn.LayerNorm(width), nn.Linear(width, len(LETTERS))), x)
    net.output(scores, slice_dim=1)
    net.loss("next letter", lambda scores, following: F.cross_entropy(scores.flatten(0, 1), following.flatten()),
             scores, following)
    return net


def batch(source: Tensor, length: int, draw: torch.Generator) -> dict[str, Tensor]:
    starts = torch.randint(len(source) - length - 1, (BATCH, 1), generator=draw) + torch.arange(length + 1)
    return {"text": source[starts][:, :-1], "following": source[starts][:, 1:]}


def main(argv: list[str] | None = None) -> dict[str, float]:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="a small net and a few steps")
    quick = options.parse_args(argv).quick
    width, length, steps = (16, 32, 15) if quick else (64, 256, 40)
    torch.set_num_threads(1)
    draw, source = torch.Generator().manual_seed(1), library_source()
    data = batch(source, length, draw)

    net = build(width)
    costs = pipec.profile(net, microbatches=MICROBATCHES, **data)
    for schedule, slices in (("1f1b", 1), ("seq-1f1b", SLICES)):
        plan = pipec.compile(net, DEVICES, MICROBATCHES, schedule, slices=slices, costs=costs, update="all")
        line = plan.simulate()
        print(f"{schedule:<9}{slices} slices: {line.makespan:.1f} ms, bubble {line.bubble:.1%}")
    report = pipec.check(net, data, devices=DEVICES, microbatches=MICROBATCHES, schedule="seq-1f1b", slices=SLICES)
    whole, cut = (pipec.reference(build(width), slices=k).step(**data).loss for k in (1, SLICES))
    print(f"{report}\nLoss of the whole sequence {whole:.6f}, in slices {cut:.6f}\n")

    parameters = list({id(p): p for s in net.spec.stages for p in s.fn.parameters()}.values())
    losses: list[float] = []
    with pipec.Runner(net, plan, optimizer=torch.optim.AdamW(parameters, lr=3e-3)) as run:
        for _ in progress(steps, lambda: f"loss {losses[-1]:.3f}"):
            losses.append(float(run.step(**batch(source, length, draw)).loss))
    print(f"Loss from {losses[0]:.2f} to {losses[-1]:.2f}; a blind guess has {math.log(len(LETTERS)):.2f}.")
    return {"exact": bool(report), "apart": float(abs(whole - cut)), "first": losses[0], "last": losses[-1]}


if __name__ == "__main__":
    main()
