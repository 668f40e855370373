"""A stage that hands on its own buffers: each reader sees them as they were in its microbatch."""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
from layers import linear
from models import WIDTH, data, gradients, kept_streams, runner, same
from torch import Tensor, nn
from torch.nn import functional as F

import pipec

__all__ = ["kept_streams"]


class Counts(nn.Module):
    """Hands on a view of its counter, which it moves in every forward from number ``since`` on."""

    def __init__(self, since: int = 0) -> None:
        super().__init__()
        self.net, self.since, self.forwards = linear(), since, 0
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        if self.training:
            self.forwards += 1
            if self.forwards > self.since:
                self.count += 1
        return {"h": self.net(x), "count": self.count.view(())}


class Uses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = linear()

    def forward(self, value: dict[str, Tensor]) -> Tensor:
        return self.net(value["h"] + value["count"])


def counting(since: int = 0) -> pipec.Pipeline:
    torch.manual_seed(5)
    net = pipec.Pipeline("counting")
    x, y = net.input("x"), net.input("y")
    first = net.stage("first", Counts(since), x)
    made = net.stage("second", Uses(), first)
    net.output(first["count"], "count", dim=None)
    net.loss("mse", F.mse_loss, made, y)
    return net


@pytest.mark.parametrize("backend", ["threads", "replay"])
@pytest.mark.parametrize("how", [{}, {"recompute": {"second": "always"}}, {"schedule": "zb-h1"}], ids=str)
@pytest.mark.parametrize("devices", [1, 2])
def test_a_changing_buffer_is_handed_on_as_it_was(devices: int, how: dict[str, Any], backend: str) -> None:
    net, plain = counting(), counting()
    with runner(net, devices, 3, **{"schedule": "gpipe"} | how, backend=backend) as run:
        results = [run.step(**data(9, seed)) for seed in range(2)]
        assert [float(one) for one in run.evaluate(**data(6)).outputs["count"]] == [6.0] * 3
    assert [[float(one) for one in result.outputs["count"]] for result in results] == [[1, 2, 3], [4, 5, 6]]
    first, second = (stage.fn for stage in plain.spec.stages)
    for seed in range(2):
        given = data(9, seed)
        for x, y in zip(given["x"].split(3), given["y"].split(3), strict=True):
            F.mse_loss(second(first(x)), y).backward(torch.tensor(1 / 3))
    assert same(gradients(net), gradients(plain))


def test_a_buffer_that_begins_to_change_later_is_found_after_the_step() -> None:
    net, plain = counting(since=5), counting(since=5)
    loop = pipec.reference(plain, 4)
    with runner(net, 2, 4, "gpipe", backend="replay") as run:  # with threads its readers may notice first
        assert torch.equal(run.step(**data(8)).loss, loop.step(**data(8)).loss)
        before = gradients(net)
        with pytest.raises(pipec.RunError, match="'first' hands on its buffer 'count', which it changes for the first"):
            run.step(**data(8, 1))
        assert same(gradients(net), before)
        first: Any = net.spec.stages[0].fn
        assert float(first.count) == 0
        first.forwards = 4  # its own number of calls is no buffer
        assert torch.equal(run.step(**data(8, 1)).loss, loop.step(**data(8, 1)).loss)
    assert same(gradients(net), gradients(plain))


@pytest.mark.parametrize(("schedule", "update"), [("1f1b", None), ("pipedream", "stage")])
def test_a_buffer_that_stays_is_handed_on_without_a_copy(schedule: str, update: str | None) -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = linear()
            self.register_buffer("table", torch.ones(WIDTH))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.net(x), self.table

    seen = []
    first = Table()
    net = models.of_modules(first, lambda v: (seen.append(v[1].data_ptr()), v[0] * v[1])[1], linear())
    with runner(net, 3, 2, schedule, update=update, optimizer=update and torch.optim.SGD) as run:
        for seed in range(3):
            run.step(**data(8, seed))
    assert set(seen[2:]) == {first.table.data_ptr()}  # the first run of a stage is on copies of all that it reads
