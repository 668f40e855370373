"""Parameters that several stages use, that are frozen, or that nobody uses."""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
from layers import linear
from models import WIDTH, data, equal_everywhere, kept_streams, parameters, runner, same
from torch import Tensor, nn
from torch.nn import functional as F

import pipec

__all__ = ["kept_streams"]


def test_one_weight_in_two_stages_by_hand() -> None:
    """w = 2, y = 3 w, z = y w: dz/dw = 12."""
    w = torch.tensor(2.0, requires_grad=True)
    net = pipec.Pipeline("tiny")
    x = net.input("x", split=None)
    y = net.stage("first", lambda p, x: x * p, x, params=w)
    net.loss("z", lambda z: z, net.stage("second", lambda p, y: y * p, y, params=w), reduction="sum")
    for devices in (1, 2):
        w.grad = None
        with runner(net, devices, 1) as run:
            assert run.step(x=torch.tensor(3.0)).loss == 12.0
        assert w.grad == 12.0


def tied() -> pipec.Pipeline:
    torch.manual_seed(0)
    net = pipec.Pipeline("tied")
    ids, y = net.input("ids"), net.input("y")
    embedding, out = nn.Embedding(10, WIDTH), nn.Linear(WIDTH, 10, bias=False)
    out.weight = embedding.weight
    left, right = linear(), linear()
    right.bias = left.bias
    a = net.stage("embed", embedding, ids)
    b = net.stage("left", left, a)
    c = net.stage("right", right, b)
    d = net.stage("out", out, c)
    net.output(d)
    net.loss("ce", lambda logits, y: F.cross_entropy(logits, y, reduction="sum"), d, y, count=lambda y: y.numel())
    return net


@pytest.mark.parametrize("update", [None, "stage", "all"])
@pytest.mark.parametrize("make", [
    lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9), lambda p: torch.optim.Adam(p, lr=0.05),
])
@pytest.mark.parametrize(("devices", "schedule", "recompute"), [
    (1, "gpipe", "never"), (2, "1f1b", "always"), (4, "1f1b", "never"), (4, "gpipe", "always"),
])
def test_tied_weights_stay_tied_and_train_as_one(
    devices: int, schedule: str, recompute: str, make: Any, update: str | None
) -> None:
    given = {"ids": torch.arange(8) % 7, "y": torch.arange(8) % 10}
    mine, theirs = tied(), tied()
    plain = make(parameters(theirs))
    loop = pipec.reference(theirs, 3)
    own = make(parameters(mine)) if update != "stage" else make
    with runner(mine, devices, 3, schedule, recompute=recompute, update=update,
                optimizer=None if update is None else own) as run:
        for _ in range(10):
            got = run.step(**given)
            expected = loop.step(**given)
            plain.step()
            plain.zero_grad()
            if update is None:
                own.step()
                own.zero_grad()
    assert got.loss == expected.loss
    assert same([p.detach() for p in parameters(mine)], [p.detach() for p in parameters(theirs)])
    assert mine.spec.stages[0].fn.weight is mine.spec.stages[3].fn.weight


def test_frozen_and_unused_parameters_have_no_gradient() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = linear(), linear()

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    def build() -> pipec.Pipeline:
        torch.manual_seed(0)
        frozen = linear()
        frozen.weight.requires_grad_(False)
        return models.of_modules(frozen, Unused(), linear().requires_grad_(False), linear())

    equal_everywhere(build, data())
    net = build()
    with runner(net) as run:
        run.step(**data())
        assert net.spec.stages[0].fn.weight.grad is None
        assert net.spec.stages[1].fn.unused.weight.grad is None
        net.spec.stages[0].fn.weight.requires_grad_(True)  # thawed between two steps
        run.step(**data())
        assert net.spec.stages[0].fn.weight.grad is not None


@pytest.mark.parametrize("first", [True, False])
def test_a_sparse_gradient_and_a_dense_one_add_up(first: bool) -> None:
    """An embedding and a head with its weight, either one the first stage; over two steps."""
    def build() -> pipec.Pipeline:
        torch.manual_seed(0)
        table = nn.Parameter(torch.randn(10, WIDTH))
        net = pipec.Pipeline("sparse")
        ids, y = net.input("ids"), net.input("y")
        ways = [lambda w, i: F.embedding(i, w, sparse=True), lambda w, i: F.one_hot(i, 10).to(w.dtype) @ w]
        one, other = (net.stage(name, way, ids, params=table) for name, way in zip("ab", ways[:: 1 if first else -1],
                                                                                   strict=True))
        net.loss("mse", lambda a, b, y: ((a + b - y) ** 2).mean(), one, other, y)
        return net

    given = {"ids": torch.tensor([1, 1, 3, 9]), "y": torch.ones(4, WIDTH)}
    nets = [build() for _ in range(3)]
    whole = nets[2].spec.stages[0].params
    for _ in range(2):
        with runner(nets[0], 2, 2) as run:
            run.step(**given)
        pipec.reference(nets[1], 2).step(**given)
        (2 * whole[given["ids"]] - given["y"]).square().mean().backward()
    totals = [net.spec.stages[0].params.grad for net in nets]
    assert torch.equal(totals[0], totals[1])
    torch.testing.assert_close(totals[0], totals[2])
