"""Models of the GPU checks: a small one with everything in it, one with large borders, and others' pipelines."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipec

Step = Callable[[], Any]


class Normal(nn.Module):
    """Batch normalisation over rows and positions, then dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.line = nn.BatchNorm1d(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.line(self.norm(x.flatten(0, 1)).view_as(x)), 0.2, self.training)


class Attend(nn.Module):
    """Attention with dropout inside the kernel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0)


class Join(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.line = nn.Linear(2 * width, width)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.line(torch.cat([x, skip], -1)).tanh()


def mixed(device: torch.device, width: int = 32, hold: str | None = None) -> pipec.Pipeline:
    """Eight stages, two long skips, a stage that hands its input on, batch norm, dropout of both kinds; ``hold``: where
    the skips wait."""
    torch.manual_seed(0)
    net = pipec.Pipeline("mixed")
    x, y = net.input("x"), net.input("y")
    first = net.stage("first", nn.Sequential(nn.Linear(width, width), nn.GELU()).to(device), x)
    attend = net.stage("attend", Attend(width).to(device), first)
    norm = net.stage("norm", Normal(width).to(device), attend)
    same = net.stage("same", nn.Identity(), norm)
    feed = net.stage("feed", nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU()).to(device), same)
    join = net.stage("join", Join(width).to(device), feed, pipec.skip(attend, hold=hold))
    again = net.stage("again", Attend(width).to(device), join)
    last = net.stage("last", Join(width).to(device), again, pipec.skip(first, hold=hold))
    net.output(last)
    net.loss("mse", F.mse_loss, last, y)
    return net


def tied(device: torch.device, words: int = 96, width: int = 32) -> pipec.Pipeline:
    """Four stages: an embedding, two layers with a bias in common, and a head with the embedding's weight."""
    torch.manual_seed(0)
    net = pipec.Pipeline("tied")
    ids, y = net.input("ids"), net.input("y")
    embedding, head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
    left, right = nn.Linear(width, width), nn.Linear(width, width)
    head.weight, right.bias = embedding.weight, left.bias
    value = net.stage("embed", embedding.to(device), ids)
    value = net.stage("left", nn.Sequential(left, nn.GELU()).to(device), value)
    value = net.stage("right", right.to(device), value)
    net.loss("ce", F.cross_entropy, net.stage("head", head.to(device), value), y)
    return net


class Wide(nn.Module):
    """Little arithmetic on much data, after a sleep, with a poisoned piece of memory before and after.

    The poison is what a reader sees that comes before its value was written, or after its memory was given away.
    """

    def __init__(self, width: int, cycles: int, products: bool) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((width,), 1.01))
        self.line = nn.Linear(width, width) if products else None
        self.cycles = cycles

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        torch.full_like(x, float("nan"))
        if self.cycles and x.is_cuda:
            torch.cuda._sleep(self.cycles)
        for other in others:
            x = x + other
        x = x * self.gain
        if self.line is not None:
            for _ in range(4):
                x = self.line(x)
        torch.full_like(x, float("nan"))
        return x


class Borders:
    """Four stages that give each other wide values, the first one's read by the last as well."""

    def __init__(self, device: torch.device, cycles: int, products: bool = False, width: int = 1024) -> None:
        torch.manual_seed(0)
        self.width = width
        self.net = net = pipec.Pipeline("borders")
        x, y = net.input("x"), net.input("y")
        a = net.stage("a", Wide(width, cycles, products).to(device), x)
        b = net.stage("b", Wide(width, cycles, products).to(device), a)
        c = net.stage("c", Wide(width, cycles, products).to(device), b)
        d = net.stage("d", Wide(width, cycles, products).to(device), c, pipec.skip(a))
        net.loss("mse", F.mse_loss, d, y)


@contextmanager
def torchgpipe_step(device: torch.device, microbatches: int) -> Iterator[Step]:
    """One step of torchgpipe on the Transformer of the speed check."""
    from models import transformer
    from torchgpipe import GPipe

    model = transformer(32, 512, 1024, 8)
    net = GPipe(
        nn.Sequential(*(part.module for part in model.parts)), balance=[len(model.parts)], devices=[device],
        chunks=microbatches, checkpoint="never",
    )
    x, y = (part.to(device) for part in model.batch)
    yield lambda: model.loss(net(x), y).backward()


@contextmanager
def torch_pipelining(device: torch.device, microbatches: int) -> Iterator[Step]:
    """One step of torch.distributed.pipelining, a process of one rank, on the Transformer of the speed check."""
    import torch.distributed as dist
    from models import transformer
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    model = transformer(32, 512, 1024, 8) if device.type != "cpu" else transformer(4, 8, 32, 2)
    module = nn.Sequential(*(part.module for part in model.parts)).to(device)
    x, y = (part.to(device) for part in model.batch)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        schedule = ScheduleGPipe(PipelineStage(module, 0, 1, device), microbatches, loss_fn=model.loss)
        yield lambda: schedule.step(x, target=y)
    finally:
        dist.destroy_process_group()
