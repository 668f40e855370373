"""A character Transformer whose embedding is tied: the first and the last stage share one weight.

    python examples/char_transformer.py
    python examples/char_transformer.py --quick

Data: the source text of Python's own standard library. In one process a parameter that two stages use is one
parameter: its gradient is the sum of both uses, and it is updated once.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from helpers import gpus, progress
from torch import Tensor, nn

import pipec

LETTERS = "\n" + "".join(chr(code) for code in range(32, 127))
LENGTH, BATCH, MICROBATCHES = 64, 16, 4


class Embed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.letter, self.place = nn.Embedding(len(LETTERS), width), nn.Parameter(torch.zeros(LENGTH, width))
        nn.init.normal_(self.letter.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        return self.letter(text) + self.place


class Block(nn.Module):
    """Attention to the letters before, then two linear layers, each added to what came in."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.qkv, self.join = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(2, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, 2))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.join(seen)
        return x + self.mlp(self.norm2(x))


class Head(nn.Module):
    """Scores of every letter, by the very weight that embeds them."""

    def __init__(self, embed: Embed, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.weight = embed.letter.weight  # tied

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), self.weight)


def build(width: int, blocks: int) -> pipec.Pipeline:
    torch.manual_seed(0)
    net = pipec.Pipeline("letters")
    text, following = net.input("text"), net.input("following")
    embed = Embed(width)
    x = net.stage("embed", embed, text)
    for number in range(blocks):
        x = net.stage(f"block{number}", Block(width), x)
    scores = net.stage("head", Head(embed, width), x)
    net.output(scores)
    net.loss("next letter", lambda scores, following: F.cross_entropy(scores.flatten(0, 1), following.flatten()),
             scores, following)
    return net


def library_source() -> Tensor:
    """Some modules of the standard library as one row of letter numbers."""
    names = ["argparse.py", "ast.py", "dataclasses.py", "inspect.py", "pathlib.py", "statistics.py", "typing.py"]
    folder = Path(os.__file__).parent
    source = "".join((folder / name).read_text("utf-8") for name in names if (folder / name).exists())
    return torch.tensor([LETTERS.index(letter) for letter in source if letter in LETTERS])


def batch(source: Tensor, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(source) - LENGTH - 1, (BATCH, 1), generator=draw) + torch.arange(LENGTH + 1)
    rows = source[starts]
    return rows[:, :-1], rows[:, 1:]


def main(argv: list[str] | None = None) -> dict[str, float]:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="a small net and a few steps")
    quick = options.parse_args(argv).quick
    width, blocks, steps = (32, 2, 20) if quick else (96, 4, 300)
    torch.set_num_threads(1)
    draw, source = torch.Generator().manual_seed(1), library_source()
    text, following = batch(source, draw)

    net = build(width, blocks)
    costs = pipec.profile(net, microbatches=MICROBATCHES, text=text, following=following)
    plan = pipec.compile(net, 2, MICROBATCHES, update="all", costs=costs)
    print(plan.simulate(), "\n")
    report = pipec.check(net, {"text": text, "following": following}, devices=2, microbatches=MICROBATCHES)
    print(report, "\n")

    embed, head = net.spec.stage("embed").fn, net.spec.stage("head").fn
    parameters = list({id(p): p for s in net.spec.stages for p in s.fn.parameters()}.values())
    optimizer = torch.optim.AdamW(parameters, lr=3e-3)
    losses: list[float] = []
    with pipec.Runner(net, plan, devices=gpus(2, most=1), optimizer=optimizer) as run:
        for _ in progress(steps, lambda: f"loss {losses[-1]:.3f}"):
            losses.append(float(run.step(*batch(source, draw)).loss))
        shown = "def main(self, "
        for _ in range(0 if quick else 120):
            context = torch.tensor([[LETTERS.index(letter) for letter in shown[-LENGTH:].rjust(LENGTH)]])
            odds = run.forward(context).output[0, -1].cpu().div(0.5).softmax(0)
            shown += LETTERS[int(torch.multinomial(odds, 1, generator=draw))]
    tied = embed.letter.weight is head.weight
    print(f"Loss from {losses[0]:.2f} to {losses[-1]:.2f}; a blind guess has {math.log(len(LETTERS)):.2f}.")
    print(f"One weight in both stages: {tied}\n\n{shown}")
    return {"exact": bool(report), "tied": tied, "first": losses[0], "last": losses[-1]}


if __name__ == "__main__":
    main()
