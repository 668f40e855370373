"""Flushed after every step an asynchronous pipeline is a synchronous one: skips, buffers, dropout and losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import same
from test_asynchronous_runs import momentum
from torch import Tensor, nn
from torch.nn import functional as F

import pipec


class Down(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(torch.relu(self.norm(self.linear(x))))  # type: ignore[no-any-return]


class Up(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: Tensor, skipped: Tensor) -> Tensor:
        return torch.tanh(self.linear(torch.cat([x, skipped], 1)))


def weighed(out: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return ((out - y).pow(2).mean(1) * weight).sum()


def total(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return weight.sum()


def made() -> pipec.Pipeline:
    """A small U-Net with a loss in its middle, and one that counts weights of rows."""
    torch.manual_seed(0)
    net = pipec.Pipeline("u")
    x, y, weight = net.input("x"), net.input("y"), net.input("weight")
    first = net.stage("down1", Down(), x)
    second = net.stage("down2", Down(), first)
    middle = net.stage("middle", Down(), second)
    up = net.stage("up2", Up(), middle, pipec.skip(second))
    last = net.stage("up1", Up(), up, pipec.skip(first))
    net.output(last)
    net.loss("error", weighed, last, y, weight, count=total)
    net.loss("size", lambda value: F.mse_loss(value, torch.zeros_like(value)), middle)
    return net


def trained(schedule: Any, microbatches: int, backend: str, placement: Any) -> dict[str, Tensor]:
    net, make = made(), torch.Generator().manual_seed(1)
    devices = 5 if placement == "linear" else 2
    plan = pipec.compile(net, devices, microbatches, schedule, placement=placement, update="stage")
    with pipec.Runner(net, plan, optimizer=momentum, backend=backend, seed=3) as run:
        for number in range(4):
            x, y = torch.randn(13, 4, generator=make), torch.randn(13, 4, generator=make)
            result = run.step(x=x, y=y, weight=torch.rand(13, generator=make))
            if plan.asynchronous:
                assert result.finished + run.flush().finished == tuple((number, m) for m in range(microbatches))
        return run.state_dict()


SCHEDULES = {
    "pipedream": pipec.PipeDream(), "vertical": pipec.PipeDream(vertical_sync=True), "2bw": pipec.PipeDream2BW(),
    "live": pipec.LiveWeights(), "full": pipec.PipeMare(correction=None), "predicted": pipec.Predicted(),
    "segments": pipec.PipeMare(correction=None, segments=2), "delayed": pipec.Delayed(3, 1),
}


@pytest.mark.parametrize("placement", ["linear", "v", (0, 1, 0, 1, 0)])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_step_and_a_flush_are_a_synchronous_step(name: str, placement: Any) -> None:
    for microbatches, backend in ((5, "replay"), (5, "threads")) if name == "2bw" else ((1, "replay"), (3, "threads")):
        found = trained(SCHEDULES[name], microbatches, backend, placement)
        expected = trained("1f1b", microbatches, "replay", placement)
        assert same(found, expected)
