"""The models that the benchmarks train, each a list of parts, so that every contender runs the same layers.

A part reads the pipeline's input ``"x"`` or the results of earlier parts by name, as a stage of pipec does. From the
parts come the pipec pipeline, the two halves of a loop written by hand, and the plain model. Building a model twice
gives the same weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import pipec


class Part(NamedTuple):
    """One stage: its module is called with the values named in ``reads``."""

    name: str
    module: nn.Module
    reads: tuple[str, ...]


class Model(NamedTuple):
    """A model and its data.

    Attributes:
        split: the first ``split`` parts form device 0, the others device 1; chosen so that both take about as long.
        batch: (x, y) of one step.
    """

    name: str
    parts: list[Part]
    split: int
    loss: Any  # (result, y) -> scalar
    batch: tuple[Tensor, Tensor]

    def parameters(self) -> list[nn.Parameter]:
        return [p for part in self.parts for p in part.module.parameters()]

    def pipeline(self) -> pipec.Pipeline:
        """The pipec declaration: a stage per part."""
        net = pipec.Pipeline(self.name)
        values = {"x": net.input("x")}
        target = net.input("y")
        for part in self.parts:
            values[part.name] = net.stage(part.name, part.module, *(values[name] for name in part.reads))
        net.loss("loss", self.loss, values[self.parts[-1].name], target)
        return net

    def placement(self, devices: int) -> list[int]:
        """One device per stage."""
        return [int(devices > 1 and index >= self.split) for index in range(len(self.parts))]

    def border(self) -> tuple[str, ...]:
        """The values that go from device 0 to device 1, in the order in which they are made."""
        made = [part.name for part in self.parts[: self.split]]
        wanted = {name for part in self.parts[self.split :] for name in part.reads}
        return tuple(name for name in made if name in wanted)

    def halves(self) -> tuple[Section, Section]:
        """Both devices' parts as one module each: x -> border, border -> result."""
        last = self.parts[-1].name
        border = self.border()
        return (Section(self.parts[: self.split], ("x",), border), Section(self.parts[self.split :], border, (last,)))

    def whole(self) -> Section:
        """The model as one module: x -> (result,)."""
        return Section(self.parts, ("x",), (self.parts[-1].name,))


class Section(nn.Module):
    """Consecutive parts as one module; values nobody reads any more are dropped on the way."""

    def __init__(self, parts: Sequence[Part], takes: tuple[str, ...], gives: tuple[str, ...]) -> None:
        super().__init__()
        self.takes, self.gives = takes, gives
        self.parts = list(parts)
        self.layers = nn.ModuleList(part.module for part in parts)
        last = {name: index for index, part in enumerate(parts) for name in part.reads}
        self.dead = [
            [name for name, at in last.items() if at == index and name not in gives] for index in range(len(parts))
        ]

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        values = dict(zip(self.takes, inputs, strict=True))
        for part, dead in zip(self.parts, self.dead, strict=True):
            values[part.name] = part.module(*(values[name] for name in part.reads))
            for name in dead:
                del values[name]
        return tuple(values[name] for name in self.gives)


# -- a U-Net with long skips ------------------------------------------------------------------------------------


def convolutions(*channels: int) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for before, after in pairwise(channels):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(8, after), nn.SiLU()]
    return layers


class Up(nn.Module):
    """A decoder block: halve the channels, double the size, join the skip, convolve."""

    def __init__(self, before: int, after: int, head: int | None = None) -> None:
        super().__init__()
        self.narrow = nn.Conv2d(before, after, 1)
        self.convolve = nn.Sequential(*convolutions(2 * after, after, after))
        self.head = nn.Identity() if head is None else nn.Conv2d(after, head, 1)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        wide = functional.interpolate(self.narrow(x), scale_factor=2.0)
        result: Tensor = self.head(self.convolve(torch.cat([wide, skip], 1)))
        return result


def unet(rows: int = 8, width: int = 16, size: int = 64) -> Model:
    """Three levels and a middle, GroupNorm, skips from every encoder to its decoder, all across the border."""
    torch.manual_seed(0)
    w1, w2, w3, w4 = width, 2 * width, 4 * width, 8 * width
    pool = nn.MaxPool2d(2)
    parts = [
        Part("enc1", nn.Sequential(*convolutions(3, w1, w1)), ("x",)),
        Part("enc2", nn.Sequential(pool, *convolutions(w1, w2, w2)), ("enc1",)),
        Part("enc3", nn.Sequential(pool, *convolutions(w2, w3, w3)), ("enc2",)),
        Part("mid1", nn.Sequential(pool, *convolutions(w3, w4, w4)), ("enc3",)),
        Part("mid2", nn.Sequential(*convolutions(w4, w4, w4)), ("mid1",)),
        Part("mid3", nn.Sequential(*convolutions(w4, w4)), ("mid2",)),
        Part("dec3", Up(w4, w3), ("mid3", "enc3")),
        Part("dec2", Up(w3, w2), ("dec3", "enc2")),
        Part("dec1", Up(w2, w1, head=3), ("dec2", "enc1")),
    ]
    images = torch.randn(rows, 3, size, size)
    return Model("unet", parts, 6, functional.mse_loss, (images, torch.randn(rows, 3, size, size)))


# -- a Transformer ----------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return result


class Block(nn.Module):
    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


def transformer(rows: int = 8, length: int = 48, width: int = 256, blocks: int = 8) -> Model:
    """Pre-norm causal blocks, a stage each, half of them per device; trained on a mean squared error."""
    torch.manual_seed(0)
    parts = [
        Part(f"block{index}", Block(width), (f"block{index - 1}" if index else "x",)) for index in range(blocks)
    ]
    x, y = torch.randn(2, rows, length, width)
    return Model("transformer", parts, blocks // 2, functional.mse_loss, (x, y))


# -- two extremes -----------------------------------------------------------------------------------------------


def matmul(rows: int = 512, width: int = 512, stages: int = 8) -> Model:
    """Nothing but products of matrices: two 512 x 512 layers a stage."""
    torch.manual_seed(0)
    parts = []
    for index in range(stages):
        layers = [nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
        parts.append(Part(f"stage{index}", nn.Sequential(*layers), (f"stage{index - 1}" if index else "x",)))
    x, y = torch.randn(2, rows, width)
    return Model("matmul", parts, stages // 2, functional.mse_loss, (x, y))


def spin(turns: int) -> float:
    """Work that never lets go of the interpreter lock."""
    total = 0.0
    for turn in range(turns):
        total += math.sqrt(turn)
    return total


class Spinning(torch.autograd.Function):
    """The identity, after a loop in pure Python both ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, turns: int) -> Tensor:
        ctx.turns = turns
        spin(turns)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        spin(ctx.turns)
        return gradients[0], None


class Python(nn.Module):
    """A stage that is nearly all Python."""

    def __init__(self, turns: int) -> None:
        super().__init__()
        self.turns, self.linear = turns, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Spinning.apply(self.linear(x), self.turns)  # type: ignore[no-untyped-call]
        return result


def pure_python(rows: int = 16, turns: int = 30_000, stages: int = 4) -> Model:
    """Stages that hold the interpreter lock: two threads cannot be faster than one."""
    torch.manual_seed(0)
    parts = [
        Part(f"stage{index}", Python(turns), (f"stage{index - 1}" if index else "x",)) for index in range(stages)
    ]
    x, y = torch.randn(2, rows, 8)
    return Model("pure Python", parts, stages // 2, functional.mse_loss, (x, y))
