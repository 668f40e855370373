"""Plain training, to compare with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from models import chain, data, parameters
from torch import Tensor

import pipec


def values(net: pipec.Pipeline) -> list[Tensor]:
    return [p.detach() for p in parameters(net)]


def trained_by_the_reference(
    steps: int, make: Callable[..., Any], schedule: Callable[..., Any] | None = None, count: int = 4
) -> tuple[list[Tensor], list[float]]:
    """Parameters, and the first learning rate in each step, of the plain loop with one optimizer."""
    net = chain(3)
    loop, optimizer = pipec.reference(net, count), make(parameters(net))
    scheduler = schedule(optimizer) if schedule else None
    rates = []
    for number in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        loop.step(**data(8, number))
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return values(net), rates


def sgd(params: Any) -> torch.optim.SGD:
    return torch.optim.SGD(params, lr=0.1)


def trained_by_two(make: Any) -> list[Tensor]:
    net = chain(2)
    pipec.reference(net, 4).step(**data())
    make(parameters(net)).step()
    return values(net)
