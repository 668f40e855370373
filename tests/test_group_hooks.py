"""Hooks that wait for several gradients, and trackers of all modules, around a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import pipec

SIZES = [8, 400]  # below and above the size from which autograd itself adds to .grad


def build(wide: int) -> tuple[pipec.Pipeline, nn.Sequential]:
    torch.manual_seed(1)
    net, model = pipec.Pipeline("net"), nn.Sequential(*(nn.Linear(wide, wide) for _ in range(4)))
    value, y = net.input("x"), net.input("y")
    for place, module in enumerate(model):
        value = net.stage(f"s{place}", module, value)
    net.loss("mse", F.mse_loss, value, y)
    return net, model


def batch(wide: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {name: torch.randn(8, wide, generator=draw) for name in "xy"}


def runs(net: pipec.Pipeline, schedule: str) -> Any:
    if schedule == "reference":
        return pipec.reference(net, 4)
    update = "stage" if schedule == "pipedream" else None
    optimizer = (lambda p: torch.optim.SGD(p, lr=0.0)) if update else None
    return pipec.Runner(net, pipec.compile(net, 2, 4, schedule, update=update), optimizer=optimizer)


HOW = ["reference", "1f1b", "zb-h1", "pipedream"]


@pytest.mark.parametrize("wide", SIZES)
@pytest.mark.parametrize("how", HOW)
def test_a_hook_on_several_parameters_is_refused_before_the_step(how: str, wide: int) -> None:
    net, model = build(wide)
    calls: list[Any] = []
    run = runs(net, how)
    handle = register_multi_grad_hook((model[2].weight, model[2].bias), calls.append)
    with pytest.raises(pipec.RunError, match=r"'s2': 'weight', 'bias' have .*register_post_accumulate_grad_hook"):
        run.step(**batch(wide))
    assert not calls
    assert all(p.grad is None for p in model.parameters())
    handle.remove()
    run.step(**batch(wide))
    if how != "reference":
        run.close()


@pytest.mark.parametrize("wide", SIZES)
@pytest.mark.parametrize("how", HOW)
def test_the_other_mode_runs_in_every_backward(how: str, wide: int) -> None:
    net, model = build(wide)
    calls: list[Any] = []
    register_multi_grad_hook((model[2].weight, model[2].bias), calls.append, mode="any")
    run = runs(net, how)
    run.step(**batch(wide))
    if how == "pipedream":
        run.flush()
    assert len(calls) == 4 or how == "pipedream"  # which may compute with copies of the weights, without their hooks
    if how != "reference":
        run.close()


@pytest.mark.parametrize("wide", SIZES)
@pytest.mark.parametrize("how", HOW)
def test_floating_point_operations_of_a_step_are_counted(how: str, wide: int) -> None:
    net, model = build(wide)
    data = batch(wide)
    with FlopCounterMode(display=False) as whole:
        F.mse_loss(model(data["x"]), data["y"]).backward()
    expected = [p.grad for p in model.parameters()]
    for p in model.parameters():
        p.grad = None
    run = runs(net, how)
    with FlopCounterMode(display=False) as counted:
        run.step(**data)
        if how == "pipedream":
            run.flush()
    assert counted.get_total_flops() == whole.get_total_flops()
    if how == "pipedream":
        run.close()
        return
    watched = [p.grad for p in model.parameters()]
    for p, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, gradient)
        p.grad = None
    run.step(**data)  # without a counter again
    assert all(torch.equal(a, p.grad) for a, p in zip(watched, model.parameters(), strict=True))  # type: ignore[arg-type]
    if how != "reference":
        run.close()


class Watching(nn.Module):
    """Waits in its own forward: for its input's gradient, or for that of something it has computed."""

    def __init__(self, wide: int, what: str) -> None:
        super().__init__()
        self.line, self.what, self.calls = nn.Linear(wide, wide), what, 0

    def forward(self, x: Tensor) -> Tensor:
        out = self.line(x)
        if x.requires_grad:
            register_multi_grad_hook((x if self.what == "read" else out, out * 1.0), self.count)
        return out

    def count(self, _: Any) -> None:
        self.calls += 1


@pytest.mark.parametrize("wide", SIZES)
@pytest.mark.parametrize("how", HOW[:3])
def test_hooks_that_a_stage_sets_in_its_forward(how: str, wide: int) -> None:
    for what in ("made", "read"):
        net = pipec.Pipeline("net")
        x, y = net.input("x"), net.input("y")
        module = Watching(wide, what)
        net.loss("mse", F.mse_loss, net.stage("b", module, net.stage("a", nn.Linear(wide, wide), x)), y)
        run = runs(net, how)
        if what == "made" or how == "zb-h1":
            run.step(**batch(wide))
            assert module.calls == 4
        else:
            with pytest.raises(pipec.RunError, match=r"on what it reads or on a parameter, .*microbatch"):
                run.step(**batch(wide))
        if how != "reference":
            run.close()
