"""Evaluation: eval mode, no gradients, nothing kept, and training afterwards as if it had not been."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import models
import pytest
import torch
from models import WIDTH, buffers, chain, data, gradients, kept_streams, runner, same
from torch import Tensor, nn
from torch.nn import functional as F

import pipec

__all__ = ["kept_streams"]


def noisy() -> pipec.Pipeline:
    """Batch norm and dropout: eval mode shows in every number."""
    torch.manual_seed(0)
    return models.of_modules(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH)
    )


def plain_eval(net: pipec.Pipeline, x: Tensor) -> Tensor:
    flags = [(m, m.training) for s in net.spec.stages for m in s.fn.modules()]
    with torch.no_grad():
        for stage in net.spec.stages:
            x = stage.fn.eval()(x)
    for module, flag in flags:
        module.training = flag
    return x


CONTEXTS: list[Any] = [torch.enable_grad, torch.no_grad, torch.inference_mode]


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("backend", ["threads", "replay"])
@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("context", CONTEXTS)
def test_evaluate_train_evaluate_train(devices: int, backend: str, recompute: str, context: Any) -> None:
    mine, theirs = noisy(), noisy()
    loop = pipec.reference(theirs, 4, seed=3)
    plan = pipec.compile(mine, devices, 4, recompute=recompute)
    with pipec.Runner(mine, plan, backend=backend, seed=3) as run:
        for number, rows in enumerate((8, 16)):
            given, held_out = data(rows, number), data(9, 7)
            before, kept = gradients(mine), buffers(mine)
            with context():
                result = run.evaluate(**held_out)
            torch.testing.assert_close(result.output, plain_eval(mine, held_out["x"]))
            torch.testing.assert_close(result.loss, F.mse_loss(plain_eval(mine, held_out["x"]), held_out["y"]))
            assert not result.output.requires_grad
            assert gradients(mine) == before if number == 0 else same(gradients(mine), before)
            assert same(buffers(mine), kept)
            got, expected = run.step(**given), loop.step(**given)
            assert same([got.losses, got.outputs], [expected.losses, expected.outputs])
    assert same(gradients(mine), gradients(theirs))
    assert same(buffers(mine), buffers(theirs))


def test_no_gradient_is_made_and_no_graph_is_built() -> None:
    net, seen = chain(3), []
    for stage in net.spec.stages:
        stage.fn.register_forward_hook(lambda m, args, out: seen.append((m.training, out.requires_grad)))
    with runner(net, 3, recompute="always") as run:
        run.evaluate(**data())
    assert set(seen) == {(False, False)}
    assert len(seen) == 3 * 4  # no recompute
    assert set(gradients(net)) == {None}


@pytest.mark.parametrize("fails", [False, True])
def test_mixed_train_and_eval_flags_are_put_back(fails: bool) -> None:
    net = noisy()
    first = net.spec.stages[0].fn
    first[1].eval()
    flags = [m.training for s in net.spec.stages for m in s.fn.modules()]
    with runner(net, 2) as run:
        if fails:
            handle = first.register_forward_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError) as caught:
                run.evaluate(**data())
            assert "stage 'a', microbatch 0, FORWARD" in caught.value.__notes__[0]
            handle.remove()
        else:
            run.evaluate(**data())
        assert [m.training for s in net.spec.stages for m in s.fn.modules()] == flags
        kept = first[1].running_mean.clone()
        run.step(**data())
    assert torch.equal(first[1].running_mean, kept)


@pytest.mark.parametrize("rows", [1, 3, 8, 64])
def test_any_number_of_rows(rows: int) -> None:
    net = chain(3)
    with runner(net, 3, 4) as run:
        result = run.evaluate(**data(rows))
        assert result.microbatches == min(rows, 4)
        torch.testing.assert_close(result.output, plain_eval(net, data(rows)["x"]))


def test_without_targets() -> None:
    def build(count: bool) -> pipec.Pipeline:
        net = pipec.Pipeline("targets")
        x, y, mask = net.input("x"), net.input("y"), net.input("mask")
        h = net.stage("a", nn.Linear(WIDTH, WIDTH), x)
        net.output(h)
        net.loss("mse", F.mse_loss, h, y)
        how: Any = {"count": lambda mask: mask.sum()} if count else {"reduction": "sum"}
        net.loss("size", lambda h: h.abs().sum(), h, **how)
        if not count:
            net.loss("masked", lambda h, mask: (h * mask).sum(), h, mask, reduction="sum")
        return net

    x = data()["x"]
    with runner(build(False), 1) as run:
        assert set(run.evaluate(x=x).losses) == {"size"}
        assert set(run.evaluate(x=x, mask=torch.ones(8, 1)).losses) == {"size", "masked"}
        assert run.forward(x=x).losses == {}
        with pytest.raises(pipec.RunError, match="no loss was computed"):
            _ = run.forward(x=x).loss
        with pytest.raises(pipec.RunError, match="input 'x' is missing"):
            run.evaluate(y=x)
        with pytest.raises(pipec.RunError, match="input 'y' is missing"):
            run.step(x=x, mask=torch.ones(8, 1))
    with runner(build(True), 1) as run:  # what the count needs is missing, so the loss is left out
        assert run.evaluate(x=x).losses == {}
        assert set(run.evaluate(x=x, mask=torch.ones(8, 1)).losses) == {"size"}


def test_training_under_no_grad_says_what_to_do() -> None:
    with runner(chain(2)) as run:
        for context in (torch.no_grad, torch.inference_mode):
            with context(), pytest.raises(pipec.RunError, match=r"use evaluate\(\)"):
                run.step(**data())
        run.step(**data())


def test_a_forward_only_plan_without_a_loss() -> None:
    net = pipec.Pipeline("inference")
    x = net.input("x")
    h = net.stage("b", nn.Linear(WIDTH, WIDTH), net.stage("a", nn.Linear(WIDTH, WIDTH), x))
    net.output(h, "h")
    with runner(net, 2, 3, forward_only=True) as run:
        result = run.evaluate(data(7)["x"])
        torch.testing.assert_close(result.outputs["h"], plain_eval(net, data(7)["x"]))
        with pytest.raises(pipec.RunError, match="forward_only=True"):
            run.step(data(7)["x"])


@pytest.mark.parametrize("backend", ["threads", "replay"])
def test_nothing_is_held_afterwards(backend: str) -> None:
    net, alive = chain(3), []
    for stage in net.spec.stages:
        stage.fn.register_forward_hook(lambda _m, args, out: alive.append(weakref.ref(out)))
    gc.collect()
    gc.disable()
    try:
        with runner(net, 3, backend=backend) as run:
            for call in (run.evaluate, run.forward, run.step):
                call(**data())
        assert len(alive) == 3 * 3 * 4
        assert all(ref() is None for ref in alive)
    finally:
        gc.enable()


def test_a_loss_module_is_in_eval_mode_too_and_comes_back() -> None:
    seen: list[bool] = []

    class Loss(nn.Module):
        def forward(self, h: Tensor, y: Tensor) -> Tensor:
            seen.append(self.training)
            return F.mse_loss(h, y)

    loss = Loss()
    with runner(chain(2, loss=loss), 2, 1) as run:
        run.step(**data())
        run.evaluate(**data())
        run.step(**data())
    assert seen == [True, False, True]
    assert loss.training


def test_a_module_that_a_function_borrows_follows_evaluation() -> None:
    drop = nn.Dropout(0.5)
    net = pipec.Pipeline("net")
    x = net.input("x")
    value = net.stage("drop", lambda v: drop(v), net.stage("line", nn.Identity(), x))
    net.output(value)
    with pipec.Runner(net, pipec.compile(net, 2, 2, forward_only=True)) as run:
        assert torch.equal(run.evaluate(torch.ones(4, 3)).output, torch.ones(4, 3))
    assert drop.training


def test_a_borrowed_module_that_changes_is_refused() -> None:
    norm = nn.BatchNorm1d(3, affine=False)
    net = pipec.Pipeline("net")
    net.output(net.stage("norm", lambda v: norm(v), net.input("x")))
    plan = pipec.compile(net, 1, 2, forward_only=True)
    with pytest.raises(pipec.RunError, match=r"stage 'norm' uses the module 'norm' \(BatchNorm1d\) from outside"):
        pipec.Runner(net, plan)
    norm.eval()
    pipec.Runner(net, plan).close()


def test_lazy_parameters_are_named() -> None:
    net = pipec.Pipeline("net")
    net.output(net.stage("lazy", nn.LazyLinear(3), net.input("x")))
    with pytest.raises(pipec.RunError, match="stage 'lazy' has lazy parameters"):
        pipec.Runner(net, pipec.compile(net, 1, 2, forward_only=True))
