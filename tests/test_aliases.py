"""Values that share memory: writing into one of them is what the uncut model does, or an error."""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
from layers import Gives, Takes, linear
from models import WIDTH, data, gradients, kept_streams, runner
from torch import Tensor, nn
from torch.nn import functional as F

import pipec
from pipec.runtime.aliases import overlap

__all__ = ["kept_streams"]


def through(passing: Any, write: Any, *, skip: bool, output: bool = False) -> pipec.Pipeline:
    """a -> passing -> write -> join; with ``skip`` the last stage reads a's own value too."""
    torch.manual_seed(0)
    net = pipec.Pipeline("net")
    x, y = net.input("x"), net.input("y")
    a = net.stage("a", linear(), x)
    b = net.stage("write", write, net.stage("passing", passing, a))
    if output:
        net.output(a, name="made")
    net.loss("mse", F.mse_loss, net.stage("join", torch.add, b, a) if skip else net.stage("last", linear(), b), y)
    return net


@pytest.mark.parametrize("backend", ["threads", "replay"])
@pytest.mark.parametrize("passing", [nn.Flatten(), nn.Identity(), nn.Dropout(0.0), lambda h: h.view(-1, WIDTH)])
def test_writing_into_a_view_of_what_a_later_stage_reads(passing: Any, backend: str) -> None:
    write = nn.ReLU(inplace=True)
    net = through(passing, write, skip=True)
    with runner(net, 4, 2, backend=backend) as run:
        if isinstance(passing, nn.Dropout):
            passing.eval()  # gives its input itself
        for _ in range(2):
            with pytest.raises(pipec.RunError, match="'write' writes in place into 'passing'; that shares memory with "
                               "'a', which stage 'join' reads later"):
                run.step(**data())
            assert set(gradients(net)) == {None}
        write.inplace = False  # mended between two steps
        run.step(**data())
    write.inplace = True
    with pytest.raises(pipec.RunError, match="shares memory with 'a'"):
        pipec.reference(net, 2).step(**data())
    with runner(through(passing, nn.ReLU(inplace=True), skip=False, output=True), 2, 2, backend=backend) as run:
        with pytest.raises(pipec.RunError, match="shares memory with the output 'made', which the caller is given"):
            run.step(**data())
        with pytest.raises(pipec.RunError, match="shares memory with the output 'made'"):
            run.evaluate(**data())


@pytest.mark.parametrize("passing", [nn.Tanh(), nn.Dropout(0.5), lambda h: h.clone(), lambda h: h[:, :4].repeat(1, 2)])
def test_a_copy_may_be_written_into(passing: Any) -> None:
    net = through(passing, nn.ReLU(inplace=True), skip=True)
    assert pipec.check(net, data(), devices=3, microbatches=2)
    assert pipec.check(through(nn.Flatten(), nn.ReLU(inplace=True), skip=False), data(), devices=3, microbatches=2)


@pytest.mark.parametrize("backend", ["threads", "replay"])
@pytest.mark.parametrize("passing", [nn.Flatten(), nn.Identity()])
def test_writing_into_a_view_of_an_input(passing: nn.Module, backend: str) -> None:
    """A residual from the input to the end: in the uncut model it is of what was written."""
    write = nn.ReLU(inplace=True)

    def net(reader: str) -> pipec.Pipeline:
        torch.manual_seed(0)
        net = pipec.Pipeline("net")
        x, y = net.input("x"), net.input("y")
        first = net.stage("passing", passing, x)
        if reader == "first":  # the writer reads the input and another stage the view of it
            b = net.stage("write", write, x)
            made = net.stage("join", torch.add, net.stage("last", linear(), b), first)
        else:
            b = net.stage("write", write if reader == "join" else lambda h, x: write(h) + x, first,
                          *([] if reader == "join" else [x]))
            made = net.stage("join", torch.add, net.stage("last", linear(), b), x if reader == "join" else b)
        net.loss("mse", F.mse_loss, made, y)
        return net

    for reader, told in (
        ("join", "into 'passing'; that shares memory with 'x', which stage 'join' reads later"),
        ("itself", "into 'passing'; that shares memory with 'x', which it reads as well"),
        ("first", "into 'x'; that shares memory with 'passing', which stage 'join' reads later"),
    ):
        refused = pytest.raises(pipec.RunError, match=f"'write' writes in place {told}")
        with runner(net(reader), 2, 2, backend=backend) as run, refused:
            run.step(**data())
        with refused:
            pipec.reference(net(reader), 2).step(**data())


def halves(h: Tensor) -> tuple[Tensor, Tensor]:
    return h[:, :4], h[:, 4:]


@pytest.mark.parametrize("make", [
    lambda h: (h, h), lambda h: (h, h[:, :4]), lambda h: (h, h.T), lambda h: (h[:, :5], h[:, 4:]),
    lambda h: {"a": h, "b": [h.view(-1)]}, lambda h: (h, h.unsqueeze(1).expand(-1, 3, -1)),
])
def test_writing_into_one_of_two_parts_that_share_memory(make: Any) -> None:
    def write(v: Any) -> Tensor:
        first = v["a"] if isinstance(v, dict) else v[0]
        return F.pad(first.add_(1), (0, WIDTH - first.shape[1]))

    net = models.of_modules(Gives(make), Takes(write))
    with runner(net, 2, 2) as run, pytest.raises(
        pipec.RunError, match="'b' writes in place into 'a'; that shares memory with another part of it, which it reads"
    ):
        run.step(**data())


def test_parts_that_lie_beside_each_other_may_be_written_into() -> None:
    def write(v: Any) -> Tensor:
        return torch.cat([v[0].mul_(2), v[1]], 1)

    net = models.of_modules(Gives(halves), Takes(write))
    assert pipec.check(net, data(), devices=2, microbatches=2)
    d, first, second = data(), net.spec.stages[0].fn, net.spec.stages[1].fn
    with runner(net, 2, 2) as run:
        torch.testing.assert_close(run.step(**d).outputs["b"], second(first(d["x"])))


@pytest.mark.parametrize("how", ["inference", "no_grad"])
def test_evaluation_finds_writes_without_counting_them(how: str) -> None:
    mode = torch.inference_mode if how == "inference" else torch.no_grad
    with runner(through(nn.Tanh(), nn.ReLU(inplace=True), skip=True), 3, 2) as run, mode():
        run.forward(x=data()["x"])
    torch.manual_seed(0)
    net = pipec.Pipeline("net")
    x, y = net.input("x"), net.input("y")
    a = net.stage("a", linear(), x)
    b = net.stage("b", nn.ReLU(inplace=True), a)
    net.loss("mse", F.mse_loss, net.stage("c", torch.add, b, a), y)
    with runner(net, 3, 2) as run, mode(), pytest.raises(pipec.RunError, match="'b' writes in place into 'a', which"):
        run.forward(x=data()["x"])
    given = data()["x"]
    kept = given.clone()
    with runner(models.of_modules(nn.ReLU(inplace=True), linear()), 2, 2) as run:
        with mode():
            results = [run.forward(x=given).outputs["b"] for _ in range(2)]
        assert torch.equal(*results)
        assert torch.equal(given, kept)
        run.step(x=given, y=data()["y"])
        assert torch.equal(given, kept)


def test_overlap_by_hand() -> None:
    base = torch.arange(24.0).view(4, 6)
    assert overlap(base, base.T)
    assert overlap(base[:, ::2], base[1:, 2:3])
    assert not overlap(base[:, ::2], base[:, 1::2])
    assert not overlap(base[:2], base[2:])
    assert not overlap(base, base.clone())
    assert overlap(base[1].expand(5, 6), base[:, 3])
    assert not overlap(base[:0], base)
    assert overlap(base, base.view(torch.int32))
    assert not overlap(base, base.to_sparse())
