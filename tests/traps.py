"""Pipelines whose stages raise, die or hang where a test says, and what ranks do with them."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
from models import WIDTH, data, of_modules, same, snapshot
from torch import Tensor, nn
from torch.autograd import Function

import pipec


class QuarrelError(Exception):
    """An error whose constructor needs arguments."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


class Trap(nn.Module):
    """Does ``what`` at the ``number``-th forward or backward it sees."""

    def __init__(self, what: Any, number: int, backward: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.what, self.number, self.back, self.seen = what, number, backward, 0

    def spring(self) -> None:
        self.seen += 1
        if self.seen == self.number:
            self.what()

    def forward(self, x: Tensor) -> Tensor:
        if not self.back:
            self.spring()
            return self.layer(x)
        return Snare.apply(self.layer(x), self)


class Snare(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, trap: Trap) -> Tensor:
        ctx.trap = trap
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.trap.spring()
        return gradient, None


def value_error() -> None:
    raise ValueError("a wrong value")


def quarrel() -> None:
    raise QuarrelError(1, 2)


def leave() -> None:
    raise SystemExit(5)


def memory() -> None:
    raise RuntimeError("out of memory")


def die() -> None:
    os._exit(7)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def freeze() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hang() -> None:
    time.sleep(30)


WHAT = {"value": value_error, "quarrel": quarrel, "leave": leave, "memory": memory, "die": die, "kill": kill,
        "hang": hang, "freeze": freeze}


def trapped(what: str, stage: int, number: int, backward: bool, stages: int) -> pipec.Pipeline:
    torch.manual_seed(5)
    layers: list[nn.Module] = [nn.Linear(WIDTH, WIDTH) for _ in range(stages)]
    layers[stage] = Trap(WHAT[what], number, backward)
    return of_modules(*layers)


def survived(rank: int, what: str, stage: int, number: int, backward: bool, size: int, how: dict[str, Any]) -> Any:
    """One good step, one that fails in ``stage``, one good step again: (error, unchanged, equal afterwards)."""
    net = trapped(what, stage, 4 + number, backward, size)
    plain = trapped(what, stage, 10_000, backward, size)
    plan = pipec.compile(net, size, 4, **how)
    loop = pipec.reference(plain, 4)
    with pipec.Runner(net, plan) as run:
        run.step(**data())
        loop.step(**data())
        before = snapshot(net)
        begin = time.monotonic()
        try:
            run.step(**data(9))
            told: Any = None
        except BaseException as error:
            told = type(error).__name__, str(error), getattr(error, "rank", None), getattr(error, "__notes__", [])
        spent = time.monotonic() - begin
        unchanged = same(snapshot(net), before)
        result, expected = run.step(**data(8, 3)), loop.step(**data(8, 3))
        own = [n for n, s in enumerate(run.stages) if s.fn is not None]
        mine, theirs = ([p.grad for n in own for p in s.spec.stages[n].fn.parameters()] for s in (net, plain))
        return told, unchanged, same(result.losses, expected.losses) and same(mine, theirs), spent


def doomed(rank: int, what: str, stage: int, number: int, backward: bool, size: int, timeout: float) -> float:
    net = trapped(what, stage, 4 + number, backward, size)
    with pipec.Runner(net, pipec.compile(net, size, 4), timeout=timeout) as run:
        for step in range(3):
            run.step(**data(8, step))
    return 0.0
