"""Clipping by the global norm, and loss scaling."""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
from models import chain, data, gradients, kept_streams, parameters, runner, same, snapshot
from torch import nn
from training import sgd, trained_by_two, values

import pipec

__all__ = ["kept_streams"]


def three_and_four() -> pipec.Pipeline:
    """Two stages whose gradients have the norms 3 and 4."""
    net = pipec.Pipeline("clip")
    x = net.input("x")
    one, two = (torch.zeros(1, requires_grad=True) for _ in range(2))
    a = net.stage("a", lambda p, x: x * p * 3.0, x, params=one)
    b = net.stage("b", lambda p, a, x: a + x * p * 4.0, a, x, params=two)
    net.loss("sum", lambda b: b.sum(), b, reduction="sum")
    return net


@pytest.mark.parametrize("update", ["stage", "all"])
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_clipping_sees_the_global_norm(schedule: str, devices: int, update: str) -> None:
    net, norms = three_and_four(), []
    make = lambda p: torch.optim.SGD(p, lr=1.0)  # noqa: E731
    with runner(net, devices, 2, schedule, update=update,
                optimizer=make(parameters(net)) if update == "all" else make,
                before_update=lambda p: norms.append(float(nn.utils.clip_grad_norm_(p, 1.0)))) as run:
        run.step(x=torch.full((2, 1), 0.5))
    assert norms == [5.0]
    torch.testing.assert_close([float(p) for p in values(net)], [-0.6, -0.8])


def test_a_shared_parameter_counts_once_in_clipping() -> None:
    shared, seen = nn.Linear(8, 8), []
    net = models.of_modules(shared, nn.Tanh(), shared)
    with runner(net, 3, update="stage", optimizer=sgd, before_update=lambda p: seen.append([id(q) for q in p])) as run:
        run.step(**data())
    assert seen == [[id(p) for p in shared.parameters()]]


def scaler(scale: float = 1024.0) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)


def test_scaling_by_hand() -> None:
    """loss 3 p, scale 1024: after unscaling and SGD with rate 0.5, p = 1 -> -0.5."""
    p = torch.ones(1, requires_grad=True)
    seen: list[float] = []
    net = pipec.Pipeline("scaled")
    out = net.stage("a", lambda p, x: x * p, net.input("x"), params=p)
    net.loss("sum", lambda h: h.sum(), out, reduction="sum")
    p.register_hook(lambda g: seen.append(float(g)))
    with runner(net, 1, 1, update="all", optimizer=torch.optim.SGD([p], lr=0.5), scaler=scaler()) as run:
        result = run.step(x=torch.full((1, 1), 3.0))
    assert seen == [3072.0]
    assert p.item() == -0.5
    assert result.loss == 3.0
    assert not result.skipped


@pytest.mark.parametrize("update", ["stage", "all"])
@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_an_overflow_in_one_stage_updates_nobody_and_lowers_the_scale_once(
    bad: float, devices: int, update: str
) -> None:
    overflow, hooks = [True], []
    net = chain(3)
    own = scaler()
    parameters(net)[2].register_hook(lambda g: torch.full_like(g, bad) if overflow[0] else g)
    with runner(net, devices, update=update, optimizer=sgd(parameters(net)) if update == "all" else sgd, scaler=own,
                before_update=lambda p: hooks.append(len(p))) as run:
        before = snapshot(net)
        result = run.step(**data())
        assert result.skipped
        assert same(snapshot(net), before)
        assert own.get_scale() == 512.0
        assert hooks == []
        overflow[0] = False
        assert not run.step(**data()).skipped
        assert hooks == [6]
        run.step(**data(8, 2))
        assert own.get_scale() == 1024.0  # grown after two good steps, once per step and not per optimizer
    plain = chain(3)
    loop, other = pipec.reference(plain, 4), sgd(parameters(plain))
    for given in (data(), data(8, 2)):
        loop.step(**given)
        other.step()
        other.zero_grad()
    for mine, theirs in zip(values(net), values(plain), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_step_that_fails_after_unscaling_does_not_block_the_next() -> None:
    broken = [True]

    def hook(_: Any) -> None:
        if broken.pop():
            raise ValueError("hook")

    net, own = chain(2), scaler()
    with runner(net, 2, update="stage", optimizer=sgd, scaler=own, before_update=hook) as run:
        with pytest.raises(ValueError, match="hook"):
            run.step(**data())
        broken.append(False)
        assert not run.step(**data()).skipped
    assert own.get_scale() == 1024.0


def test_the_scripts_own_scaler_and_optimizer() -> None:
    net, own = chain(2), scaler()
    optimizer = sgd(parameters(net))
    with runner(net, 2, scaler=own) as run:
        loss = run.step(**data()).loss
        raw = [g.clone() for g in gradients(net)]
        own.step(optimizer)
        own.update()
    plain = chain(2)
    assert pipec.reference(plain, 4).step(**data()).loss == loss
    for mine, theirs in zip(raw, gradients(plain), strict=True):
        assert torch.equal(mine, theirs * 1024.0)
    sgd(parameters(plain)).step()
    for mine, theirs in zip(values(net), values(plain), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_disabled_scaler_does_nothing() -> None:
    net = chain(2)
    with runner(net, 2, update="stage", optimizer=sgd, scaler=torch.amp.GradScaler("cpu", enabled=False)) as run:
        run.step(**data())
    assert same(values(net), trained_by_two(sgd))
