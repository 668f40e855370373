"""A pipeline that fails where a test says."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipec


class Bomb:
    """Raises when it is told to, and once only."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.at: tuple[str, int] = ("", -1)
        self.armed: str | None = None

    def arm(self, place: str, stage: str, microbatch: int, error: BaseException) -> BaseException:
        self.armed, self.at, self.error = place, (stage, microbatch), error
        return error

    def check(self, place: str, stage: str, microbatch: int) -> None:
        if self.armed == place and self.at == (stage, microbatch):
            self.armed = None
            assert self.error is not None
            raise self.error


class Fuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bomb: Bomb, stage: str, microbatch: int) -> Tensor:
        ctx.told = bomb, stage, microbatch
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        bomb, stage, microbatch = ctx.told
        bomb.check("backward", stage, microbatch)
        return grad * 1.0, None, None, None


class Fragile(nn.Module):
    """A stage with a buffer; what it reads names the microbatch in its first column."""

    def __init__(self, name: str, bomb: Bomb) -> None:
        super().__init__()
        self.net, self.norm, self.name, self.bomb = nn.Linear(4, 4), nn.BatchNorm1d(4), name, bomb
        self.runs: dict[int, int] = {}

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        m = int(number[0])
        out = self.norm(self.net(x)).tanh()
        self.runs[m] = self.runs.get(m, 0) + 1
        self.bomb.check("forward" if self.runs[m] == 1 else "recompute", self.name, m)
        if out.requires_grad and self.bomb.armed == "hook" and self.bomb.at == (self.name, m):
            out.register_hook(lambda _: self.bomb.check("hook", self.name, m))
        return Fuse.apply(out, self.bomb, self.name, m)


def fragile() -> tuple[pipec.Pipeline, Bomb, list[Fragile]]:
    torch.manual_seed(0)
    bomb, net, made = Bomb(), pipec.Pipeline("fragile"), []
    value, number, y = net.input("x"), net.input("number"), net.input("y")
    for name in ("first", "second", "third"):
        made.append(Fragile(name, bomb))
        value = net.stage(name, made[-1], value, number)

    def loss(h: Tensor, y: Tensor, number: Tensor) -> Tensor:
        bomb.check("loss", "third", int(number[0]))
        return F.mse_loss(h, y)

    net.loss("mse", loss, value, y, number)
    return net, bomb, made


def minibatch() -> dict[str, Tensor]:
    make = torch.Generator().manual_seed(3)
    return {"x": torch.randn(8, 4, generator=make), "y": torch.randn(8, 4, generator=make),
            "number": torch.arange(4).repeat_interleave(2)}


def notes(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", []))


def workers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("pipec fragile")}
