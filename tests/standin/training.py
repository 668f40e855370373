"""Pipelines on the stand-in accelerator beside the plain loop on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from models import WIDTH, buffers, data, gradients, parameters, same
from test_lanes import Join
from torch import Tensor, nn
from torch.nn import functional as F

import pipec
import standin
from pipec.tree import flatten

REAL = {"one": lambda count: ["standin:2"] * count, "several": lambda count: [f"standin:{n}" for n in range(count)],
        "two": lambda count: [f"standin:{1 - n % 2}" for n in range(count)]}


def deep(stages: int = 8, dropout: float = 0.3, hold: str | None = None) -> pipec.Pipeline:
    """A chain with dropout and batch norm, a long skip over all of it and one in its middle."""
    torch.manual_seed(11)
    net = pipec.Pipeline("deep")
    value, y = net.input("x"), net.input("y")
    first = middle = None
    for number in range(stages):
        if number == stages - 1:
            value = net.stage(f"s{number}", Join(), value, pipec.skip(first, hold=hold))
        elif number == stages // 2 + 1:
            value = net.stage(f"s{number}", Join(), value, pipec.skip(middle, hold=hold))
        elif number % 3 == 1:
            layers = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(dropout)]
            value = net.stage(f"s{number}", nn.Sequential(*layers), value)
        else:
            value = net.stage(f"s{number}", nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), value)
        first = value if number == 0 else first
        middle = value if number == max(stages // 2 - 1, 0) else middle
    net.output(value)
    net.loss("mse", F.mse_loss, value, y)
    return net


def at_home(tree: Any) -> Any:
    """The leaves on the CPU, read on the caller's current streams as a script would, and how they hang together."""
    leaves, layout = flatten(tree)
    return [leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf for leaf in leaves], str(layout)


def of(result: Any) -> list[Any]:
    return at_home([result.losses, result.outputs])


def state(net: pipec.Pipeline) -> list[Any]:
    return at_home([parameters(net), gradients(net), buffers(net)])


def compare(
    build: Any, devices: int, schedule: Any, real: str = "several", steps: int = 2, microbatches: int = 4, **how: Any
) -> None:
    """Steps of a plan on stand-in devices give the bits of the plain loop on the CPU, without any problem."""
    mine, theirs = build(), build()
    loop = pipec.reference(theirs, microbatches, seed=3)
    plan = pipec.compile(mine, devices, microbatches, schedule, **how)
    with pipec.Runner(mine, plan, devices=REAL[real](devices), seed=3) as run:
        for step in range(steps):
            got, expected = run.step(**data(8, step)), loop.step(**data(8, step))
            assert same(of(got), of(expected))
        assert same(state(mine), state(theirs))
    assert standin.problems() == []
