"""The two networks of PipeMare's experiments in shape, narrow enough for a CPU: one weight a stage.

ResNet-50 has 53 convolutions, each followed by a norm, and one linear layer: 107 stages. An encoder-decoder Transformer
of six and six layers has six weights in each encoder layer, nine in each decoder layer, two embeddings and an output
layer: 93 stages. What goes past a stage is a skip.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from nets import Join, Part
from torch import Tensor, nn


class Norm(nn.Module):
    """Batch norm, the other branch added where a block ends, and ReLU where one follows."""

    def __init__(self, wide: int, relu: bool = True) -> None:
        super().__init__()
        self.norm, self.relu = nn.BatchNorm2d(wide), relu

    def forward(self, x: Tensor, early: Tensor | None = None) -> Tensor:
        x = self.norm(x)
        x = x if early is None else x + early
        return x.relu() if self.relu else x


def resnet50(width: int = 4, blocks: tuple[int, ...] = (3, 4, 6, 3), classes: int = 10) -> list[Part]:
    """A ResNet of bottleneck blocks for small images: 107 stages with ResNet-50's numbers of blocks."""
    parts = [Part("conv", nn.Conv2d(3, width, 3, 1, 1, bias=False), ("image",)), Part("norm", Norm(width), ("conv",))]
    wide = width
    for level, count in enumerate(blocks):
        inner, out = width * 2**level, 4 * width * 2**level
        for block in range(count):
            name, before, stride = f"{level}.{block}.", parts[-1].name, 2 if level and not block else 1
            way = before
            if not block:  # the way past the block needs a convolution where its width changes
                way = f"{name}past norm"
                parts.append(Part(f"{name}past", nn.Conv2d(wide, out, 1, stride, bias=False), (before,)))
                parts.append(Part(way, Norm(out, relu=False), (f"{name}past",)))
            for step, layer in enumerate((nn.Conv2d(wide, inner, 1, bias=False),
                                          nn.Conv2d(inner, inner, 3, stride, 1, bias=False),
                                          nn.Conv2d(inner, out, 1, bias=False))):
                parts.append(Part(f"{name}conv{step}", layer, (f"{name}norm{step - 1}" if step else before,)))
                own = (f"{name}conv{step}",) + ((way,) if step == 2 else ())
                parts.append(Part(f"{name}norm{step}", Norm(layer.out_channels), own))
            wide = out
    linear = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(wide, classes))
    return [*parts, Part("linear", linear, (parts[-1].name,))]


class Attend(nn.Module):
    """Queries, keys and values from one weight, and the attention of every head; keys of an encoder where given."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal, self.weight = heads, causal, nn.Parameter(torch.empty(3 * width, width))
        nn.init.xavier_uniform_(self.weight)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        of_q, of_k, of_v = self.weight.chunk(3)
        keys = x if memory is None else memory
        q, k, v = (F.linear(t, w).unflatten(2, (self.heads, -1)).transpose(1, 2)
                   for t, w in ((x, of_q), (keys, of_k), (keys, of_v)))
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2)


class Letters(nn.Module):
    """An embedding with fixed places, sines of growing length."""

    def __init__(self, letters: int, width: int, length: int) -> None:
        super().__init__()
        self.letter = nn.Embedding(letters, width)
        angle = torch.arange(length)[:, None] / 10000 ** (torch.arange(0, width, 2) / width)
        self.register_buffer("place", torch.cat([angle.sin(), angle.cos()], 1), persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        return self.letter(text) + self.place[: text.shape[1]]


def transformer(letters: int = 32, width: int = 16, layers: int = 6, heads: int = 2, length: int = 16) -> list[Part]:
    """An encoder-decoder with norms after each part: 93 stages with six layers each."""
    parts = [Part("source", Letters(letters, width, length), ("text",))]

    def block(name: str, *, causal: bool, memory: str | None = None) -> None:
        before = parts[-1].name
        reads = (before,) if memory is None else (before, memory)
        parts.append(Part(f"{name}attend", Attend(width, heads, causal), reads))
        parts.append(Part(f"{name}join", Join(width, width), (f"{name}attend", before)))
        parts.append(Part(f"{name}norm", nn.LayerNorm(width), (f"{name}join",)))

    def layer(name: str, memory: str | None) -> None:
        block(f"{name}self ", causal=memory is not None)
        if memory is not None:
            block(f"{name}cross ", causal=False, memory=memory)
        before = parts[-1].name
        parts.append(Part(f"{name}wide", nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU()), (before,)))
        parts.append(Part(f"{name}narrow", Join(4 * width, width), (f"{name}wide", before)))
        parts.append(Part(f"{name}norm", nn.LayerNorm(width), (f"{name}narrow",)))

    for number in range(layers):
        layer(f"encoder{number} ", None)
    memory = parts[-1].name
    parts.append(Part("answer", Letters(letters, width, length), ("shifted",)))
    for number in range(layers):
        layer(f"decoder{number} ", memory)
    return [*parts, Part("output", nn.Linear(width, letters), (parts[-1].name,))]
