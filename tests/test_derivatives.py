"""Derivatives that do not lead through a step are refused in words; what was tried leaves the runner as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from models import data, gradients, kept_streams, runner, same
from torch import Tensor
from torch.autograd import forward_ad

import pipec

__all__ = ["kept_streams"]


def tangent(of: Callable[[Tensor], Any], x: Tensor) -> None:
    with forward_ad.dual_level():
        of(forward_ad.make_dual(x, torch.ones_like(x)))


WAYS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "grad": lambda of, x: torch.func.grad(of)(x),
    "vmap": lambda of, x: torch.func.vmap(of)(x.unflatten(0, (2, -1))),
    "jvp": lambda of, x: torch.func.jvp(of, (x,), (torch.ones_like(x),)),
    "tangent": tangent,
}


@pytest.mark.parametrize("backend", ["threads", "replay"])
@pytest.mark.parametrize("way", WAYS)
def test_transforms_and_tangents_around_a_pipeline_are_refused(way: str, backend: str) -> None:
    net, other = models.chain(2), models.chain(2)
    told = r"input 'x' of .* has a tangent" if way == "tangent" else r"cannot run inside torch\.func"
    given = data(8)
    with runner(net, 2, 2, backend=backend) as run:
        loop = pipec.reference(net, 2)
        for of in (
            lambda x: run.step(x=x, y=given["y"][: len(x)]).loss,
            lambda x: run.evaluate(x=x).output.sum(),
            lambda x: loop.step(x=x, y=given["y"][: len(x)]).loss,
        ):
            with pytest.raises(pipec.RunError, match=told):
                WAYS[way](of, given["x"])
        assert set(gradients(net)) == {None}
        result = run.step(**given)
        with forward_ad.dual_level():  # a level alone does no harm
            assert torch.equal(run.evaluate(**given).output, result.output)
    pipec.reference(other, 2).step(**given)
    assert same(gradients(net), gradients(other))


def test_a_result_cannot_be_differentiated() -> None:
    with runner(models.chain(2), 2, 2) as run:
        given = data(8)
        given["x"].requires_grad_()
        result = run.step(**given)
        for wrong in (result.loss.backward, lambda: torch.autograd.grad(result.output.sum(), given["x"])):
            with pytest.raises(RuntimeError, match="does not require grad"):
                wrong()
        assert not given["x"].grad.requires_grad
