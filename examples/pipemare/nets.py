"""The networks of the reproduction, cut as finely as PipeMare's: about one weight a stage.

A network is a list of parts; ``pipeline`` declares them as stages. Skips are ordinary edges: a residual block's input
goes straight to the stage that adds it, an encoder's output straight to every decoder layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipec


@dataclass(frozen=True)
class Part:
    """One stage: its module, and the names of the stages or inputs that it reads."""

    name: str
    module: nn.Module
    reads: tuple[str, ...]


def pipeline(name: str, parts: Iterable[Part], inputs: tuple[str, ...], target: str,
             loss: Callable[[Tensor, Tensor], Tensor]) -> pipec.Pipeline:
    """Declare the parts in order; the last one's output is the network's and is compared with the target."""
    net = pipec.Pipeline(name)
    values = {name: net.input(name) for name in (*inputs, target)}
    before = None
    for part in parts:
        reads = [values[read] if read == before or read in inputs else pipec.skip(values[read]) for read in part.reads]
        values[part.name] = net.stage(part.name, part.module, *reads)
        before = part.name
    net.output(values[before])
    net.loss("loss", loss, values[before], values[target])
    return net


# -- a ResNet for 8x8 digits: 19 stages -----------------------------------------------------------------------


class Conv(nn.Module):
    """A 3x3 convolution, group norm, and, where it ends a block, the block's input added; then ReLU."""

    def __init__(self, wide: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(wide, out, 3, stride, 1, bias=False)
        self.norm = nn.GroupNorm(4, out)

    def forward(self, x: Tensor, early: Tensor | None = None) -> Tensor:
        x = self.norm(self.conv(x))
        if early is not None:
            if early.shape != x.shape:  # a shorter way without weights: every second pixel, new channels zero
                early = F.pad(early[:, :, ::2, ::2], (0, 0, 0, 0, 0, x.shape[1] - early.shape[1]))
            x = x + early
        return x.relu()


class Pool(nn.Module):
    """The mean over pixels, normalised."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(wide)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.mean((2, 3)))


def digits_resnet(width: int = 8, blocks: tuple[int, ...] = (3, 3, 2), classes: int = 10) -> list[Part]:
    """A stem, two stages for each block, pooling and a linear layer: 19 stages with the default blocks."""
    parts, wide = [Part("stem", Conv(1, width), ("image",))], width
    for level, count in enumerate(blocks):
        for block in range(count):
            out, name, before = width * 2**level, f"{level}.{block}", parts[-1].name
            stride = 2 if level and not block else 1
            parts.append(Part(f"{name}a", Conv(wide, out, stride), (before,)))
            parts.append(Part(f"{name}b", Conv(out, out), (f"{name}a", before)))
            wide = out
    parts.append(Part("pool", Pool(wide), (parts[-1].name,)))
    parts.append(Part("linear", nn.Linear(wide, classes), ("pool",)))
    return parts


# -- a character Transformer: 10 stages ------------------------------------------------------------------------


class Embed(nn.Module):
    """Letters and their places."""

    def __init__(self, letters: int, width: int, length: int) -> None:
        super().__init__()
        self.letter, self.place = nn.Embedding(letters, width), nn.Parameter(torch.zeros(length, width))
        nn.init.normal_(self.letter.weight, std=0.1)

    def forward(self, text: Tensor) -> Tensor:
        return self.letter(text) + self.place


class Attention(nn.Module):
    """Norm, and attention to the letters before; the heads' results still apart from the way past them."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm, self.qkv = heads, nn.LayerNorm(width), nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(2, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, 2))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Join(nn.Module):
    """A linear layer, added to what went past."""

    def __init__(self, wide: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(wide, out)

    def forward(self, x: Tensor, early: Tensor) -> Tensor:
        return early + self.linear(x)


class Widen(nn.Module):
    """The first half of the two-layer part of a block."""

    def __init__(self, wide: int, out: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(wide), nn.Linear(wide, out)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.linear(self.norm(x)))


def char_transformer(letters: int, width: int = 32, blocks: int = 2, heads: int = 4, length: int = 32) -> list[Part]:
    """An embedding, four stages for each block, and the head: 10 stages with two blocks."""
    parts = [Part("embed", Embed(letters, width, length), ("text",))]
    for block in range(blocks):
        before = parts[-1].name
        parts.append(Part(f"{block}.attention", Attention(width, heads), (before,)))
        parts.append(Part(f"{block}.join", Join(width, width), (f"{block}.attention", before)))
        parts.append(Part(f"{block}.widen", Widen(width, 4 * width), (f"{block}.join",)))
        parts.append(Part(f"{block}.narrow", Join(4 * width, width), (f"{block}.widen", f"{block}.join")))
    parts.append(Part("head", nn.Sequential(nn.LayerNorm(width), nn.Linear(width, letters)), (parts[-1].name,)))
    return parts
