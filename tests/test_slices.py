"""Slices of a sequence: whatever the plan, the numbers are those of the reference."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import gradients, kept_streams, parameters, same
from plans import any_order
from sliced import LAYERS, WIDTH, WORDS, Attention, Recurrent, batch, entropy, language
from torch import Tensor, nn
from torch.nn import functional as F

import pipec
from pipec.ir import Buffer, Kind
from pipec.schedules import REGISTRY

__all__ = ["kept_streams"]

BACKENDS = ["threads", "replay", "lanes", "adversarial"]


# -- numbers -------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_every_plan_gives_the_numbers_of_the_reference(data: Any) -> None:
    layers = tuple(data.draw(st.lists(st.sampled_from([*LAYERS, "decay"]), min_size=1, max_size=3)))
    reduction = data.draw(st.sampled_from(["mean", "count"]))
    stages = len(layers) + 3
    schedule: Any = data.draw(st.sampled_from([*REGISTRY, "seq-1f1b", "random"]))
    devices = data.draw(st.integers(1, min(4, stages // 2 if schedule == "dualpipe-v" else stages)))
    if schedule == "random":
        schedule = any_order(data.draw(st.integers(0, 500)), data.draw(st.booleans()))
    mine, theirs = language(layers, reduction), language(layers, reduction)
    slices, microbatches = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    plan = pipec.compile(
        mine, devices, microbatches, schedule, slices=slices, recompute=data.draw(st.sampled_from(["never", "always"]))
    )
    loop = pipec.reference(theirs, microbatches, seed=5, slices=slices)
    with pipec.Runner(mine, plan, backend=data.draw(st.sampled_from(BACKENDS)), seed=5) as run:
        for step in range(2):  # the second adds to .grad
            given_ = batch(data.draw(st.integers(1, 4)), data.draw(st.integers(1, 7)), step)
            got, wanted = run.step(**given_), loop.step(**given_)
            assert same(got.losses, wanted.losses)
            assert same(got.outputs, wanted.outputs)
            assert same(gradients(mine), gradients(theirs))
            assert got.slices == min(slices, given_["tokens"].shape[1])


@pytest.mark.parametrize("reduction", ["mean", "count"])
@pytest.mark.parametrize(("rows", "length"), [(4, 12), (3, 7)])
def test_slices_change_nothing_but_rounding(reduction: str, rows: int, length: int) -> None:
    """Against the whole sequence at once, which needs no carry."""
    layers = ("attention", "gru", "decay", "attention")
    wanted = None
    for slices in (1, 2, 3, 5):
        net = language(layers, reduction)
        result = pipec.reference(net, 2, slices=slices).step(**batch(rows, length))
        assert result.output.shape == (rows, length, WORDS)
        found = [result.loss, result.output, *(p.grad for p in parameters(net))]
        if wanted is None:
            wanted = found
        for mine, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_gradients_flow_through_what_is_carried() -> None:
    """Without the carried gradient, later slices would not teach the earlier ones' keys."""
    whole, cut = language(("gru",)), language(("gru",))
    pipec.reference(whole).step(**batch(2, 8))

    def deaf(self: Recurrent, x: Tensor, carry: Any = None) -> Any:
        return Recurrent.forward(self, x, carry and {"state": carry["state"].detach(), "seen": 0})

    layer = cut.spec.stages[1].fn
    assert isinstance(layer, Recurrent)
    layer.forward = lambda x, carry=None: deaf(layer, x, carry)  # type: ignore[method-assign]
    pipec.reference(cut, slices=4).step(**batch(2, 8))
    far = [not torch.allclose(a.grad, b.grad, rtol=1e-3) for a, b in
           zip(parameters(whole), parameters(cut), strict=True) if a.grad is not None and b.grad is not None]
    assert any(far)


def test_inputs_that_require_a_gradient_get_it_from_all_slices() -> None:
    def build() -> pipec.Pipeline:
        torch.manual_seed(0)
        net = pipec.Pipeline("net")
        x, shift, y = net.input("x", slice_dim=1), net.input("shift"), net.input("y", slice_dim=1)
        h = net.stage("add", lambda x, shift: x + shift[:, None], x, shift)
        h = net.stage("block", Attention(), h, carry=True)
        net.loss("mse", F.mse_loss, h, y)
        return net

    x, shift = torch.randn(3, 7, WIDTH, requires_grad=True), torch.randn(3, WIDTH, requires_grad=True)
    y = torch.randn(3, 7, WIDTH)
    found = []
    for slices in (1, 3):
        net = build()
        plan = pipec.compile(net, 2, 2, "seq-1f1b", slices=slices)
        x.grad = shift.grad = None
        with pipec.Runner(net, plan) as run:
            run.step(x=x, shift=shift, y=y)
        found.append((x.grad, shift.grad))
        mine = found[-1]
        x.grad = shift.grad = None
        pipec.reference(build(), 2, slices=slices).step(x=x, shift=shift, y=y)
        assert same(mine, (x.grad, shift.grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_evaluation_and_training_steps_share_slices() -> None:
    net = language(("attention", "dropout"))
    plan = pipec.compile(net, 3, 2, "seq-1f1b", slices=3, update="all")
    with pipec.Runner(net, plan, optimizer=torch.optim.SGD(parameters(net), lr=0.1)) as run:
        before = run.evaluate(**batch(4, 9)).loss
        for _ in range(5):
            run.step(**batch(4, 9))
        after = run.evaluate(**batch(4, 9))
        assert after.loss < before
        short = run.forward(tokens=batch(4, 2)["tokens"], positions=torch.arange(2))
        assert (short.slices, short.output.shape) == (2, (4, 2, WORDS))
    assert repr(after).endswith("2 microbatches of 3 slices)")


def test_check_and_profile_know_slices() -> None:
    net = language(("attention", "gru"))
    report = pipec.check(net, batch(3, 6), devices=2, microbatches=2, schedule="seq-1f1b", slices=3)
    assert report, str(report)
    costs = pipec.profile(net, **batch(3, 6), repeats=1)
    assert costs.carry_bytes("layer0") == 3 * 3 * 6 * WIDTH * 4  # keys and values are views of what holds queries too
    assert costs.carry_bytes("embed") is None
    plan = pipec.compile(net, 2, 2, "seq-1f1b", slices=3, costs=costs)
    assert plan.simulate().peak_bytes is not None


def test_a_failure_names_the_slice() -> None:
    net = language(("attention",))

    class Sour(nn.Module):
        def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
            if int(targets[0, 0]) == 12:
                raise ValueError("sour")
            return entropy(logits, targets)

    net.loss("sour", Sour(), *_ends(net))
    plan = pipec.compile(net, 2, 1, "seq-1f1b", slices=3)
    given_ = batch(1, 6)
    given_["targets"] = torch.tensor([[1, 1, 12, 1, 1, 1]])
    with pipec.Runner(net, plan) as run, pytest.raises(ValueError, match="sour") as error:
        run.step(**given_)
    assert "stage 'head', microbatch 0.1, FORWARD (3F0.1) on device 1" in str(error.value.__notes__)


def _ends(net: pipec.Pipeline) -> tuple[Any, Any]:
    """Values that stand for the head and the targets."""
    return net._value("stage", 3), net._value("input", 1)


# -- memory -------------------------------------------------------------------------------------------------------


class Mark:
    """Something in what is carried whose life can be watched."""


class Marked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(WIDTH, WIDTH)
        self.alive: weakref.WeakSet[Mark] = weakref.WeakSet()
        self.seen: list[int] = []

    def forward(self, x: Tensor, carry: Any = None) -> tuple[Tensor, Any]:
        self.seen.append(len(self.alive))
        x = self.net(x if carry is None else x + carry[0])
        mark = Mark()
        self.alive.add(mark)
        return x, (x.mean(1, keepdim=True), mark)


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_what_is_carried_lives_as_long_as_the_plan_says(recompute: str) -> None:
    torch.manual_seed(0)
    net = pipec.Pipeline("net")
    marked = Marked()
    h = net.stage("first", nn.Linear(WIDTH, WIDTH), net.input("x", slice_dim=1))
    h = net.stage("marked", marked, h, carry=True)
    net.loss("loss", lambda h: h.square().mean(), h)
    plan = pipec.compile(net, 2, 3, "seq-1f1b", slices=3, recompute=recompute)
    carries = plan.buffers.kind == Buffer.CARRY
    with pipec.Runner(net, plan, backend="replay") as run:
        for _ in range(2):
            marked.seen.clear()
            gc.disable()
            try:
                run.step(x=torch.randn(3, 6, WIDTH))
            finally:
                gc.enable()
            tasks = np.flatnonzero((plan.table.stage == 1) & np.isin(plan.table.kind, (Kind.FORWARD, Kind.RECOMPUTE)))
            planned = [
                int((carries & (plan.buffers.writer < task) & (plan.buffers.free >= task)).sum()) for task in tasks
            ]
            assert marked.seen == planned
            assert not marked.alive
