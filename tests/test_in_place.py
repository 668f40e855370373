"""Stages that write into what they read, or first or last in place."""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
from layers import linear
from models import WIDTH, data, equal_everywhere, gradients, kept_streams, runner, same
from torch import Tensor, nn
from torch.nn import functional as F

import pipec

__all__ = ["kept_streams"]


def block() -> list[nn.Module]:
    return [nn.Conv1d(2, 2, 3, padding=1), nn.BatchNorm1d(2), nn.ReLU(inplace=True), nn.Conv1d(2, 2, 1),
            nn.InstanceNorm1d(2, affine=True), nn.LeakyReLU(inplace=True), nn.Sigmoid(), nn.Hardtanh(-0.4, 0.7, True)]


@pytest.mark.parametrize("cut", range(1, 8))
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_a_chain_with_in_place_activations_may_be_cut_anywhere(cut: int, devices: int, recompute: str) -> None:
    """Equal to the uncut model, where that can be differentiated; else to the model without the write."""
    given = {"x": data()["x"].view(-1, 2, 4), "y": data()["y"].view(-1, 2, 4)}
    kept = given["x"].clone()
    torch.manual_seed(0)
    layers = block()
    net = models.of_modules(nn.Sequential(*layers[:cut]), nn.Sequential(*layers[cut:]))
    torch.manual_seed(0)
    plain = block()
    plain[-1].inplace = False  # the uncut model may not write into what the sigmoid saved
    uncut = models.of_modules(nn.Sequential(*plain))
    models.whole(uncut, 2, given)
    with runner(net, devices, 2, recompute=recompute) as run:
        if cut <= 6:  # within one stage autograd itself finds the write into what the sigmoid saved
            with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
                run.step(**given)
            assert "stage 'b'" in caught.value.__notes__[0]
            layers[-1].inplace = False
        run.step(**given)
        first = [g.clone() for g in gradients(net)]
        run.step(**given)
    assert torch.equal(given["x"], kept)
    for mine, theirs in zip(first, gradients(uncut), strict=True):
        assert torch.equal(mine, theirs)


class Writes(nn.Module):
    """Writes into what it reads before its linear layer."""

    def __init__(self, write: Any) -> None:
        super().__init__()
        self.net, self.write = linear(), write

    def forward(self, *values: Tensor) -> Tensor:
        return self.net(self.write(*values))


@pytest.mark.parametrize("backend", ["threads", "replay"])
@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("write", [
    lambda x: x.relu_(), lambda x: x.mul_(2.0), lambda x: x.view(-1).add_(1).view(-1, WIDTH),
    lambda x: F.dropout(x, 0.0, inplace=True).add_(1), lambda x: x.detach().clamp_(0) + x,
])
def test_the_callers_own_input_is_never_written_into(write: Any, grad: bool, recompute: str, backend: str) -> None:
    given = data()
    kept, x = given["x"].clone(), given["x"].requires_grad_(grad)
    torch.manual_seed(0)
    net = models.of_modules(Writes(write), linear())
    torch.manual_seed(0)
    clean = models.of_modules(Writes(lambda x: write(x.clone())), linear())
    with runner(net, 2, recompute=recompute, backend=backend) as run:
        run.evaluate(**given)
        with torch.inference_mode():
            run.evaluate(**given)
        run.step(**given)
        assert torch.equal(x, kept)
        got = run.evaluate(**given).output
    other = kept.clone().requires_grad_(grad)
    loop = pipec.reference(clean, 4)
    loop.step(x=other, y=given["y"])
    assert same([gradients(net), x.grad], [gradients(clean), other.grad])
    with runner(clean, 1, 1) as run:
        torch.testing.assert_close(got, run.evaluate(x=kept, y=given["y"]).output)


def test_writing_into_a_value_that_others_see_later_names_both() -> None:
    def build(source: str) -> pipec.Pipeline:
        net = pipec.Pipeline("contested")
        x, y = net.input("x"), net.input("y")
        a = net.stage("a", linear(), x)
        b = net.stage("b", Writes(lambda v, w: v.add_(1) + w), *((x, a) if source == "x" else (a, x)))
        c = net.stage("c", torch.add, b, {"a": a, "x": x}[source])
        net.loss("mse", F.mse_loss, c, y)
        return net

    for source in ("a", "x"):
        told = f"stage 'b' writes in place into '{source}', which stage 'c' reads later"
        for devices in (1, 2, 3):
            given = data()
            kept = given["x"].clone()
            with runner(build(source), devices) as run, pytest.raises(pipec.RunError, match=told):
                run.step(**given)
            assert torch.equal(given["x"], kept)
        with pytest.raises(pipec.RunError, match=told):
            pipec.reference(build(source), 2).step(**data())


def test_writing_into_an_output_is_refused() -> None:
    net = pipec.Pipeline("seen")
    x, y = net.input("x"), net.input("y")
    a = net.stage("a", linear(), x)
    net.output(a)
    net.loss("mse", F.mse_loss, net.stage("b", Writes(lambda v: v.mul_(2)), a), y)
    told = "stage 'b' writes in place into 'a', which is the output"
    with runner(net) as run, pytest.raises(pipec.RunError, match=told):
        run.step(**data())


def test_adding_to_a_received_skip_in_place() -> None:
    def build(write: Any) -> pipec.Pipeline:
        torch.manual_seed(0)
        net = pipec.Pipeline("residual")
        x, y = net.input("x"), net.input("y")
        a = net.stage("a", linear(), x)
        b = net.stage("b", linear(), a)
        c = net.stage("c", Writes(write), b, pipec.skip(a))
        net.loss("mse", F.mse_loss, c, y)
        return net

    equal_everywhere(lambda: build(lambda b, a: a.add_(b)), data())
    mine, theirs = build(lambda b, a: a.add_(b)), build(lambda b, a: a + b)
    for net in (mine, theirs):
        pipec.reference(net, 3).step(**data())
    assert same(gradients(mine), gradients(theirs))


@pytest.mark.parametrize("first", ["step", "evaluate"])
def test_a_stage_that_writes_in_train_mode_only(first: str) -> None:
    """What a stage writes into is learnt in each mode: an evaluation before the first step hides nothing."""

    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = linear()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x.mul_(2.0) if self.training else x * 2.0)

    net = models.of_modules(Drops(), Drops())
    given = data()
    kept = given["x"].clone()
    with runner(net, 2) as run:
        if first == "evaluate":
            run.evaluate(**given)
        run.step(**given)
        run.evaluate(**given)
        run.step(**given)
    assert torch.equal(given["x"], kept)


@pytest.mark.parametrize("backend", ["threads", "replay"])
@pytest.mark.parametrize("grad", [False, True])
def test_a_stage_that_begins_to_write_later_fails_and_says_so(grad: bool, backend: str) -> None:
    writes = [False]

    def write(x: Tensor) -> Tensor:
        with torch.no_grad():
            return x.mul_(2.0) if writes[0] else x

    net = models.of_modules(Writes(write), linear())
    with runner(net, 2, backend=backend) as run:
        given = data()
        given["x"].requires_grad_(grad)
        run.step(**given)
        writes[0] = True
        with pytest.raises(pipec.RunError, match="stage 'a' wrote in place into 'x'"):
            run.step(**given)
