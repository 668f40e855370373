"""Values with tensors on the host among those of GPUs."""

from __future__ import annotations

from typing import Any

import torch
from models import WIDTH, data
from torch import Tensor, nn
from torch.nn import functional as F

import pipec


class Tabled(nn.Module):
    """Gives a table on the host beside its result."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"h": self.line(x), "table": torch.arange(float(len(x) * WIDTH)).view(len(x), WIDTH)}


class Reads(nn.Module):
    def forward(self, value: dict[str, Any]) -> Tensor:
        return (value["h"] * value["table"]).tanh()


def test_a_reader_on_another_gpu_waits_for_a_tensor_from_the_host() -> None:
    """It is copied by the stream of the device to which it goes, not by the one that sends the rest."""
    def build() -> pipec.Pipeline:
        torch.manual_seed(0)
        net = pipec.Pipeline("table")
        value = net.stage("reads", Reads(), net.stage("makes", Tabled(), net.input("x")))
        net.loss("mse", F.mse_loss, value, net.input("y"))
        return net

    mine, theirs = build(), build()
    with pipec.Runner(mine, pipec.compile(mine, 2, 2), devices=["standin:0", "standin:1"]) as run:
        loop = pipec.reference(theirs, 2)
        for step in range(2):
            assert run.step(**data(4, step)).loss.cpu() == loop.step(**data(4, step)).loss
